"""The API process: joins the system, serves HTTP on its own loop, and drains when told to stop.

Told to stop it is not ready any more, but serves as before for `api.drain_lag_s`, until load balancers have noticed.
Then it drains: it refuses new work and lets open streams finish. With a ready sibling it stops listening, so that the
kernel gives new connections to the sibling; alone it keeps listening, so that clients get an answer.
"""

import asyncio
import gc
import logging
import time

from common.errors import ConfigError
from common.lifecycle import Process
from services.api.app import build, read_keys
from services.api.batches.answering import Answering
from services.api.door import Link
from services.api.gateway import Gateway
from services.api.listener import Listener, listen, listening
from services.api.route import discover
from services.api.server import Server

log = logging.getLogger("api")
SWEEP_S = 5.0


async def serve(process: Process) -> None:
    """Runs until `process.stopping` and everything open has ended. Raises ConfigError if it cannot listen."""
    api, run_dir = process.config.api, process.config.run_dir
    link = Link(run_dir) if api.door else None
    listener = listening(link.sock, -1) if link else listen(api.host, api.port, run_dir)
    await run(process, Gateway(process), listener, admin_listener(process), link)


def admin_listener(process: Process) -> Listener | None:
    """The administrative address of this replica, if there is one. Raises ConfigError if it cannot be had."""
    api = process.config.api
    if not api.admin_port:
        if api.metrics == "admin":
            raise ConfigError("api.metrics is admin, but there is no api.admin_port")
        return None
    port = api.admin_port + process.instance  # figures are each replica's own
    if port == api.port or port > 65535:
        raise ConfigError(f"api.admin_port {api.admin_port} plus {process.instance} is {port}; choose another one")
    return listen(api.admin_host, port, process.config.run_dir, "api.admin_port")


async def run(
    process: Process, gateway: Gateway, listener: Listener, admin: Listener | None = None, door: Link | None = None
) -> None:
    """The same, on listeners that are given; without the door that one came from it ends, to listen afresh."""
    keyring = read_keys(gateway)
    server = Server(build(gateway, keyring), gateway.config.api)
    serving = asyncio.create_task(server.serve(sockets=[listener.sock]))
    background = [asyncio.create_task(gateway.node.run()), asyncio.create_task(_sweep(gateway))]
    answering = Answering(gateway, keyring, {each.path: each for each in discover() if each.batched})
    background.append(asyncio.create_task(gateway.keeper.run(answering)))
    stopping = asyncio.create_task(process.stopping.wait())
    if door:
        background.append(asyncio.create_task(door.watch()))
    gc.collect()
    gc.freeze()  # code and routes live as long as the process: no collection needs to look at them
    gateway.node.state = "ready"
    admin_server = Server(build(gateway, keyring, admin=True), gateway.config.api) if admin else None
    serving_admin = None
    if admin and admin_server:
        serving_admin = asyncio.create_task(admin_server.serve(sockets=[admin.sock]))
        background.append(serving_admin)
        log.info("administrative routes at %s", admin.url)
    log.info("listening at %s", listener.url)
    try:
        done, _ = await asyncio.wait([stopping, serving, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
            raise RuntimeError("a part of the API process ended by itself")
        await linger(gateway)
        await drain(gateway, server)
        await serving
        if admin_server and serving_admin:
            admin_server.should_exit = True
            await serving_admin
    finally:
        for task in (stopping, *background):
            task.cancel()
        gateway.node.leave()
        for each in (listener, admin, door):
            if each:
                each.close()


async def linger(gateway: Gateway) -> None:
    """No longer ready, but serving, for `api.drain_lag_s`."""
    gateway.set_leaving(True)
    if lag_s := gateway.config.api.drain_lag_s:
        log.info("not ready any more; serving on for %g s", lag_s)
        await asyncio.sleep(lag_s)


async def drain(gateway: Gateway, server: Server) -> None:
    """Takes no new work, waits up to `links.drain_s` for what is open, ends the rest, then closes the connections."""
    gateway.draining = True
    if gateway.siblings():
        server.stop_listening()
    log.info("draining, %d choices are open", len(gateway.hub.choices))
    deadline_s = time.monotonic() + gateway.config.links.drain_s
    while (gateway.hub.choices or gateway.hub.calls) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    if left := len(gateway.hub.choices):
        log.warning("%d choices did not end within %g s", left, gateway.config.links.drain_s)
    gateway.end_all("the server is shutting down")
    server.should_exit = True


async def _sweep(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        gateway.sweep(time.monotonic())
