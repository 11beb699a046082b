"""Celery: a task scores a list of texts; for the pools prefork, solo and threads.

celery -A celery_tasks worker -P prefork -c 2
"""

import os
from typing import Any

from celery import Celery

from gristmill import BrokerUnavailable, Client, ResultTimeout

URL = os.environ.get("GRISTMILL_REDIS", "redis://localhost:6379/0")
QUEUE = os.environ.get("GRISTMILL_QUEUE", "topics")
TIMEOUT_S = float(os.environ.get("SCORE_TIMEOUT_S", "60"))
BROKER = os.environ.get("CELERY_BROKER", URL)

app = Celery("celery_tasks", broker=BROKER, backend=BROKER)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 1  # a process takes no lists that it cannot begin
client = Client(URL)  # connects when it is first used, anew in each process of a prefork pool


@app.task(
    acks_late=True,  # the list of a killed process is scored again, which does no harm
    reject_on_worker_lost=True,
    autoretry_for=(BrokerUnavailable, ResultTimeout),
    retry_backoff=True,
    max_retries=5,
)
def score(texts: list[str]) -> list[dict[str, Any]]:
    """Return a value or an error for each text, in order. A full queue is waited for."""
    results = client.score_many(QUEUE, texts, timeout_s=TIMEOUT_S, priority="low")
    return [
        {"value": result.value} if result.error is None else {"error": result.error[0]} for result in results
    ]
