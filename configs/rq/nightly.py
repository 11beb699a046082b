"""Nightly scoring by ``rq cron``: each job submits a run, whose shards then go to the RQ workers.

Start it once, where GRISTMILL_REDIS and RQ_REDIS_URL are the URL of your Redis (RQ 2.5 or newer)::

    rq cron configs/rq/nightly.py

What it enqueues is pickled, as RQ's scheduler knows no other way: it has a queue of its own, and a worker
that needs the inputs in reach, but no model. ``{date}`` is the day on which a run is submitted.
"""

from rq import cron

from gristmill.rq_jobs import submit_bulk

cron.register(
    submit_bulk,
    queue_name="gristmill-cron",
    kwargs={
        "source": ["/data/incoming/{date}/*.parquet"],
        "out": "/data/scored/{date}.parquet",
        "queue": "topics",
        "shards": 16,
        "text_column": "text",
        "priority": "low",
        "max_errors": 1000,
        "wait": 600,  # seconds for a worker of the queue to be there
    },
    cron="30 2 * * *",  # in local time
    job_timeout=4 * 3600,  # seconds; the inputs are read once to find where shards begin
)
