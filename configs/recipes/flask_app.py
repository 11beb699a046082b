"""Flask: one Client per process; it may be made before gunicorn forks, also with --preload.

gunicorn flask_app:app --workers 2 --threads 8 --preload
curl -d '{"text": "A list can be sorted in place."}' -H 'Content-Type: application/json' localhost:8000/score
"""

import os
from http import HTTPStatus

from flask import Flask, Response, jsonify, request

from gristmill import Client, GristmillError

URL = os.environ.get("GRISTMILL_REDIS", "redis://localhost:6379/0")
QUEUE = os.environ.get("GRISTMILL_QUEUE", "topics")
TIMEOUT_S = float(os.environ.get("SCORE_TIMEOUT_S", "10"))

# Connects when it is first used, anew in each fork; an HTTP request waits 2 s for an absent Redis.
client = Client(URL, retry_s=2)
app = Flask(__name__)


@app.post("/score")
def score() -> Response:
    # The body is passed on as it came: a worker checks it. With a deadline no worker computes what nobody
    # waits for any more.
    value = client.score(QUEUE, request.get_json(), TIMEOUT_S, deadline_s=TIMEOUT_S, ttl_s=60)
    return jsonify(value)


@app.errorhandler(GristmillError)
def failed(error: GristmillError) -> Response:
    status = error.http_status  # 422, 413: the text; 503: queue full, Redis away; 504: no result in time; …
    response = jsonify(error=str(error) if status < 500 else HTTPStatus(status).phrase)
    response.status_code = status
    if status == 503:
        response.headers["Retry-After"] = "1"
    return response
