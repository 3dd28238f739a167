"""``mmstream view``: a corpus, what a model sees of it, and what a run did, in a browser.

    cli/info.py -> app.py -> a page's module -> templates/

content.py  what all pages show: the data, a pipeline, its order, the folder of a run; the samples
            that a condition chooses, and counts of the values of columns
samples.py  the grid, one sample, and its files
order.py    which step, rank and row shows a sample; the sources and buckets of steps over time
problems.py  rejects, quarantine, the bad list, takedowns, duplicates, leaks
writing.py  what is written after a question: a selection, the bad list
charts.py   statistics and the metrics of a run as pictures
pages.py    templates, what a page gets of a request, and samples as tiles
app.py      the server, on loopback; the routes, and who may ask

Only this package imports starlette and uvicorn. The pages run no script, and nothing of the data
is executed.
"""
