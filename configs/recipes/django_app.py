"""Django in one file: the view and its errors are what a project copies. One Client per process.

gunicorn django_app:app --workers 2 --threads 8
curl -d '{"text": "A list can be sorted in place."}' localhost:8000/score
"""

import json
import os
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from gristmill import Client, GristmillError

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("DJANGO_SECRET_KEY") or os.urandom(32).hex(),
    ALLOWED_HOSTS=os.environ.get("DJANGO_ALLOWED_HOSTS", "localhost,127.0.0.1").split(","),
    GRISTMILL_REDIS=os.environ.get("GRISTMILL_REDIS", "redis://localhost:6379/0"),
    GRISTMILL_QUEUE=os.environ.get("GRISTMILL_QUEUE", "topics"),
    SCORE_TIMEOUT_S=float(os.environ.get("SCORE_TIMEOUT_S", "10")),
)

# Connects when it is first used, anew in each fork; an HTTP request waits 2 s for an absent Redis.
client = Client(settings.GRISTMILL_REDIS, retry_s=2)


@csrf_exempt
@require_POST
def score(request: HttpRequest) -> JsonResponse:
    timeout_s = settings.SCORE_TIMEOUT_S
    try:
        item: Any = json.loads(request.body)
    except ValueError:
        return JsonResponse({"error": "the body is not JSON"}, status=400)
    try:
        # Passed on as it came: a worker checks it. With a deadline none computes what nobody waits for.
        value = client.score(settings.GRISTMILL_QUEUE, item, timeout_s, deadline_s=timeout_s, ttl_s=60)
    except GristmillError as error:
        return failed(error)
    return JsonResponse(value, safe=False)


def failed(error: GristmillError) -> JsonResponse:
    status = error.http_status  # 422, 413: the text; 503: queue full, Redis away; 504: no result in time; …
    message = str(error) if status < 500 else HTTPStatus(status).phrase
    headers = {"Retry-After": "1"} if status == 503 else None
    return JsonResponse({"error": message}, status=status, headers=headers)


urlpatterns = [path("score", score)]
app = get_wsgi_application()
