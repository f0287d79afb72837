"""An OpenAI-compatible server that answers at once: the calls of a script, one a reply, then "Done.". Needs only Python.

    python benchmarks/instant.py '[["get_room_status", {"room": "kitchen"}]]'      # prints its URL, ends with its stdin
"""
import asyncio
import json
import os
import sys


def reply(body, script):
    said = sum(m["role"] == "assistant" for m in body["messages"])
    message = {"role": "assistant", "content": "Done."}
    if said < len(script) and body.get("max_tokens") != 1:
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{said}", "type": "function", "function": {"name": script[said][0], "arguments": json.dumps(script[said][1])}}]}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "usage": {"prompt_tokens": 500, "completion_tokens": 20, "total_tokens": 520},
            "choices": [{"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}]}


def serve(script):
    async def talk(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
            body = json.loads(await reader.readexactly(length)) if length else None
            raw = json.dumps(reply(body, script) if body else {"data": [{"id": "toy"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
            await writer.drain()
    async def quietly(reader, writer):
        try: await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError): pass
        finally: writer.close()
    async def main():
        server = await asyncio.start_server(quietly, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0) # connections that clients keep open are nobody's concern now
    asyncio.run(main())


if __name__ == "__main__": serve(json.loads(sys.argv[1]))
