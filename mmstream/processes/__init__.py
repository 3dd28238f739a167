"""What the processes of the converter, the loader and the reader have in common.

workers.py             how a process starts, follows the main process, and ends; jobs in workers
forkserver_preload.py  what the fork server does before it forks a worker
machine.py             cores and memory of this machine, and what processes use of them
"""
