"""A front that forgets to hand the prefiller's KV cache over: it takes vllm-router's flags and asks a decoder only."""

import argparse

from aiohttp import ClientSession, ClientTimeout, web


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass a request on as it came, and the answer back as it comes."""
    async with (
        ClientSession(timeout=ClientTimeout(total=300), trust_env=False) as http,
        http.request(
            request.method, ARGS.decode + request.path_qs, data=await request.read(),
            headers={"Content-Type": "application/json"},
        ) as answer,
    ):  # fmt: skip
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        async for part in answer.content.iter_any():
            await response.write(part)
        return response


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--decode")
    ARGS = parser.parse_known_args()[0]
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    web.run_app(app, host=ARGS.host, port=ARGS.port, print=None)
