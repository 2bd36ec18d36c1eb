"""The fake's life: read the command line, bind, load, serve, end."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from .knobs import KnobError, Knobs, Moment
from .knobs import parse as parse_knobs
from .options import OptionError, Options, help_text
from .options import read as read_options
from .server import Server
from .world import Log, Recorder, World, memory_is_short, open_descriptors

__all__ = ["main"]

BACKLOG = 512
DEFAULT_DEVICES = {
    "none": "",
    "hrx": "HRX0: AMD Radeon 8060S Graphics (98304 MiB, 97520 MiB free)",
    "vulkan": "Vulkan0: llvmpipe (LLVM 15.0.6, 256 bits) (2048 MiB, 2048 MiB free)",
}
VERSIONS = {"b10068": "version: 1 (571d0d5)", "0.6.0": "version: 1 (86a2835)"}
PRINTS = ("usage", "version", "list-devices")
SHOWN_ENVIRONMENT = ("LLAMA_", "GGML_", "IREE_", "ONEBIT_", "RADV_", "FAKE_LLAMA")


def main() -> None:
    """Run the fake; never returns normally while it serves."""
    environment = dict(os.environ)
    try:
        options = read_options(sys.argv[1:], environment)
        serves = not any(options.on(name) for name in PRINTS)
        knobs = parse_knobs(environment, options.knobs, serves=serves)
        if knobs.strict and options.unknown:
            raise OptionError(f"error: invalid argument: {options.unknown[0]}\n")
    except OptionError as problem:
        sys.stderr.write(str(problem))
        sys.exit(1)
    except KnobError as problem:
        sys.stderr.write(f"1bit-fake-llama: {problem}\n")
        sys.exit(2)
    devices = [d.strip() for d in (knobs.devices or DEFAULT_DEVICES[knobs.model]).split(";") if d]
    if _printed(options, knobs, devices):
        return
    _check_device(options, devices)
    descriptors = open_descriptors() if knobs.rec else []
    log, rec = Log(options), Recorder(knobs.rec)
    world = World(knobs, log, rec)
    shown = {
        name: "..." if "KEY" in name else value
        for name, value in environment.items()
        if name.startswith(SHOWN_ENVIRONMENT) or name.lower().endswith("_proxy")
    }
    rec.write(
        "start",
        argv=sys.argv[1:],
        unknown=options.unknown,
        environment=shown,
        descriptors=descriptors,
        session=os.getsid(0),
        group=os.getpgid(0),
    )
    world.fork_grandchild()
    world.handle_signals(loaded=False)
    listener = _bind(options, world)
    _greet(options, log)
    server = Server(options, world, listener)
    world.start_thread(server.serve)
    world.start_clocks()
    _load(options, world, server, devices)
    world.handle_signals(loaded=True, on_stop=server.stop)
    server.loaded()
    rec.write("loaded")
    log.say("srv  llama_server: model loaded")
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    log.say(f"srv  llama_server: listening on http://{host}:{port}")
    while True:
        time.sleep(3600)


def _printed(options: Options, knobs: Knobs, devices: list[str]) -> bool:
    """Do what only prints, if that was asked for."""
    if options.on("usage"):
        sys.stdout.write(help_text())
    elif options.on("version"):
        sys.stderr.write((knobs.version or VERSIONS[knobs.build]) + "\n")
        sys.stderr.write("built with GNU 11.4.0 for Linux x86_64\n")
    elif options.on("list-devices"):
        sys.stdout.write("Available devices:\n" + "".join(f"  {d}\n" for d in devices))
    else:
        return False
    return True


def _check_device(options: Options, devices: list[str]) -> None:
    """Refuse a device that is not listed, where any is."""
    known = {device.partition(":")[0] for device in devices} | {"none"}
    for name in filter(None, options.text("device").split(",")):
        if devices and name not in known:
            sys.stderr.write(f'error while handling argument "--device": invalid device: {name}\n')
            sys.exit(1)


def _bind(options: Options, world: World) -> socket.socket:
    """Listen, or end as llama-server does when the port is taken."""
    host = options.text("host", "127.0.0.1")
    port = options.number("port", 8080 if world.knobs.build == "b10068" else 9931)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if world.knobs.busy_port:
            raise OSError
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except OSError:
        where = f"hostname: {host}, port: {port}"
        world.log.say(f"srv         start: couldn't bind HTTP server socket, {where}", "E")
        world.say_goodbye()
        world.log.say("srv  llama_server: exiting due to HTTP server error", "E")
        world.exit(1)
    return listener


def _greet(options: Options, log: Log) -> None:
    log.say(
        "cmn  common_param: common_params_print_info: "
        f"verbosity = {options.verbosity} (adjust with the `-lv N` CLI arg)"
    )
    if not options.text("api-key"):
        log.say("srv  llama_server: -----------------", "W")
        log.say(
            "srv  llama_server: CORS is set to allow all origins ('*') and no API key is set", "W"
        )
        log.say("srv  llama_server: -----------------", "W")
    log.say(f"srv    load_model: loading model '{options.text('model', 'fake.gguf')}'")


def _load(options: Options, world: World, server: Server, devices: list[str]) -> None:
    """Pretend to load, or fail to."""
    knobs, log = world.knobs, world.log
    model = options.text("model")
    if model:
        _check_model(model, world)
    if knobs.refuse and memory_is_short(knobs.refuse):
        device = devices[0].partition(":")[0] if devices else "CPU"
        log.say(f"alloc_tensor_range: failed to allocate {device} buffer of size 17179869184", "E")
        _fail_load(model, world)
    begun = time.monotonic()
    due = begun + knobs.lines
    while (left := begun + knobs.load - time.monotonic()) > 0:
        if knobs.lines and time.monotonic() >= due:
            due += knobs.lines
            percent = int(100 * (1 - left / knobs.load))
            log.say(knobs.line.replace("{percent}", str(percent)))
        time.sleep(max(0.0, min(left, due - time.monotonic() if knobs.lines else left)))
    world.reached(Moment("load"))
    if world.hung.is_set():
        while True:
            time.sleep(3600)
    on_gpu = bool(devices) and options.text("device") != "none"
    done, every = knobs.layers if on_gpu else (0, knobs.layers[1])
    log.say(f"load_tensors: offloaded {done}/{every} layers to GPU", verbosity=4)
    splits = 1 if not on_gpu else 2 if done == every else 2 * (every - done) + 2
    log.say("sched_reserve: graph nodes  = 936", verbosity=4)
    log.say(f"sched_reserve: graph splits = {splits}", verbosity=4)
    engine = server.engine
    unified = "true" if engine.unified else "false"
    log.say(
        f"srv    load_model: initializing, n_slots = {len(engine.slots.all)}, "
        f"n_ctx_slot = {engine.n_ctx}, kv_unified = '{unified}'"
    )


def _check_model(model: str, world: World) -> None:
    """Fail as llama-server does on a file that is missing or no GGUF."""
    try:
        with Path(model).open("rb") as file:
            magic = file.read(4)
    except OSError as problem:
        why = f"failed to open GGUF file '{model}' ({os.strerror(problem.errno or 0)})"
        world.log.say(f"gguf_init_from_file: {why}", "E")
        _fail_load(model, world)
    if len(magic) < len(b"GGUF"):
        world.log.say("gguf_init_from_reader: failed to read magic", "E")
        _fail_load(model, world)
    if magic != b"GGUF":
        shown = magic.decode("latin-1")
        why = f"invalid magic characters: '{shown}', expected 'GGUF'"
        world.log.say(f"gguf_init_from_reader: {why}", "E")
        _fail_load(model, world)


def _fail_load(model: str, world: World) -> None:
    world.log.say(f"srv    load_model: failed to load model, '{model}'", "E")
    world.say_goodbye()
    world.log.say("srv  llama_server: exiting due to model loading error", "E")
    world.exit(1)
