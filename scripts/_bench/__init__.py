"""What `scripts/bench` measures, and how.

    __main__.py   the command line                   sagas.py      what is executed
    figures.py    the figures: name, title, setup    child.py      a worker process, its CPU and its end
    plan.py       how much is measured               work.py       ... what it does: works, claims, or writes the floor
    server.py     the server under it                report.py     medians, the table, the JSON
    timing.py     seconds, CPU, percentiles          peers.py      other executors (peer_*.py run in theirs)

Nothing here is an absolute: two processes and a server share the machine's cores. So what belongs together is measured
in one run, in turn, and reported as a ratio.
"""
