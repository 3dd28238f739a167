"""Attacks: files, rows and states that a stranger may have written to do harm.

attack.py    what an attack is, and how it runs in a child process with limits
tars.py      members, headers and names of tars
folders.py   manifests, bad lists, indexes, and files that are not files
states.py    saved states
rows.py      rows of a conversion, and the media that they name
samples.py   texts and conversations; image bombs, all in one corpus

`python -m tools.prove.attack` runs all of them. A generator writes what it is asked to, so an
attack can be repeated from its name alone.
"""
