"""What a worker says of itself, and how ``gearshift status`` shows it."""

from rich.console import Console

from service.cli.operate import pool_table


async def test_the_pool_shows_what_is_wrong_with_a_worker_and_what_it_found_lost(serve):
    async with serve(stall_after_s=0.5) as serving:
        bus = serving.bus
        bus.overtaken, bus.forgotten, bus.stuck, bus.stuck_s = 7, 2, "requests/3 has lag [and] is not read", 1.0
        presence = await bus.until(lambda: next((one for one in bus.presences if one.state == "unhealthy"), None))
    console = Console(width=250, force_terminal=False)
    with console.capture() as capture:
        console.print(pool_table((presence,)))
    for text in ("requests/3 has lag [and] is not read", "took 7 requests unread", "offsets of 2 partitions"):
        assert text in capture.get()
