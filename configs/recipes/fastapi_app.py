"""FastAPI: one AsyncClient per process, opened and closed with the app.

uvicorn fastapi_app:app --workers 2
curl -d '{"text": "A list can be sorted in place."}' -H 'Content-Type: application/json' localhost:8000/score
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from gristmill import AsyncClient, GristmillError

URL = os.environ.get("GRISTMILL_REDIS", "redis://localhost:6379/0")
QUEUE = os.environ.get("GRISTMILL_QUEUE", "topics")
TIMEOUT_S = float(os.environ.get("SCORE_TIMEOUT_S", "10"))


class Item(BaseModel):
    text: str
    top_k: int = 1


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
    async with AsyncClient(URL, retry_s=2) as client:  # an HTTP request waits no longer for an absent Redis
        yield {"client": client}


app = FastAPI(lifespan=lifespan)


@app.post("/score")
async def score(item: Item, request: Request) -> Any:
    client: AsyncClient = request.state.client
    # With a deadline no worker computes what nobody waits for any more.
    request_id = await client.submit(
        QUEUE, item.text, options={"top_k": item.top_k}, deadline_s=TIMEOUT_S, ttl_s=60
    )
    answer = asyncio.create_task(client.result(request_id, TIMEOUT_S))
    hang_up = asyncio.create_task(hung_up(request))
    try:
        await asyncio.wait({answer, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result().unwrap()
        await client.cancel(QUEUE, request_id)
        return Response(status_code=499)  # nobody reads it
    finally:
        answer.cancel()
        hang_up.cancel()


async def hung_up(request: Request) -> None:
    """Return when the HTTP client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@app.exception_handler(GristmillError)
async def failed(_: Request, error: GristmillError) -> JSONResponse:
    status = error.http_status  # 422, 413: the text; 503: queue full, Redis away; 504: no result in time; …
    message = str(error) if status < 500 else HTTPStatus(status).phrase
    return JSONResponse({"error": message}, status, {"Retry-After": "1"} if status == 503 else None)
