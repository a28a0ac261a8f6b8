# mypy: ignore-errors
# It runs where dbos is installed, which is not here.
"""The five-step saga on DBOS Transact; run with the Python of an environment that has it, and nothing of ours.

`python peer_dbos.py POSTGRES_URL COUNT IN_FLIGHT` prints how many seconds the runs took, starts included.
"""

import asyncio
import json
import sys
import time

from dbos import DBOS

_, URL, COUNT, IN_FLIGHT = sys.argv
CONTEXT = {"number": 1, "filling": "x" * 240}


@DBOS.step()
async def act(order):
    return order


@DBOS.workflow()
async def fulfil(order):
    for _ in range(5):
        order = await act(order)
    return order


async def drive(count, in_flight):
    free = asyncio.Semaphore(in_flight)

    async def one():
        async with free:
            handle = await DBOS.start_workflow_async(fulfil, CONTEXT)
            await handle.get_result()

    begun = time.monotonic()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.monotonic() - begun


async def main():
    DBOS(config={"name": "bench", "system_database_url": URL, "run_admin_server": False, "log_level": "ERROR"})
    DBOS.launch()
    await drive(max(5, int(COUNT) // 20), int(IN_FLIGHT))  # opens its connections; not counted
    seconds = await drive(int(COUNT), int(IN_FLIGHT))
    DBOS.destroy()
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
