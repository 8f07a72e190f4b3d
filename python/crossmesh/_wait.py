"""Waiting in an event loop."""

from __future__ import annotations

import asyncio


async def until_ended(handle):
    """What ``await handle`` does: no thread, no polling."""
    if not handle.test():
        loop = asyncio.get_running_loop()
        ended, descriptor = loop.create_future(), handle.fileno()
        loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(descriptor)
    return handle.wait()
