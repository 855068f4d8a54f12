"""Stand-ins for the API and the tokenizer: members that do nothing, so that supervision is tested without them.

`python standin.py valence ARGS...` is the real command line, which then runs these instead of the real two services;
`python standin.py api|tokenizer --instance N --config FILE` is one of them. Scheduler and null worker are real.
"""

import asyncio
import http.server
import sys
import threading
from pathlib import Path

THIS = str(Path(__file__).resolve())


class Health(http.server.BaseHTTPRequestHandler):
    """Answers every GET with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


class Server(http.server.ThreadingHTTPServer):
    allow_reuse_port = True


def run_service() -> None:
    from common.errors import EXIT_CONFIG
    from common.lifecycle import Node, Process, main
    from common.protocol import ToApi, ToTokenizer

    service = sys.argv.pop(1)

    async def serve(process: Process) -> None:
        if service == "tokenizer" and process.config.model.name == "refuse":
            print("configuration: the stand-in refuses", file=sys.stderr)
            sys.exit(EXIT_CONFIG)
        assert process.config.model.name != "crash" or service != "tokenizer"
        node = Node(process, ToApi if service == "api" else ToTokenizer, lambda batch: None, lambda c: None, dict)
        node.state = "ready"
        running = asyncio.ensure_future(node.run())
        if service == "api":
            server = Server((process.config.api.host, process.config.api.port), Health)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        await process.stopping.wait()
        if process.config.model.name == "stubborn" and service == "tokenizer":
            await asyncio.Event().wait()
        running.cancel()
        node.leave()

    main(service, serve)  # type: ignore[arg-type]


def run_valence() -> None:
    from valence import __main__, programs
    from valence.programs import Program

    real = programs.service_command

    def command(program: Program, config_file: Path) -> list[str]:
        if program.service in ("scheduler", "worker"):
            return real(program, config_file)
        own = [sys.executable, "-P", THIS, program.service]
        return [*own, "--instance", str(program.instance), "--config", str(config_file)]

    programs.service_command = command
    del sys.argv[1]
    __main__.main()


if __name__ == "__main__":
    if sys.argv[1] == "valence":
        run_valence()
    else:
        run_service()
