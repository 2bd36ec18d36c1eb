"""One backend's life: a state machine that knows no clock, no process and no socket.

Theory of operation. A task in `live.supervise` owns one `Life` and is its only writer. What happens
in the world reaches it as an event; `step` answers with the next life and with what is to be done
about it, in order. The caller does those things; their outcome comes back as later events.

    STOPPED -Wanted-> LOADING -Healthy-> WARMING -Warmed-> READY
    LOADING, WARMING, READY -Exited-> BACKOFF or FAILED
    LOADING, WARMING, READY -Halted or Broken-> STOPPING
    STOPPING -Exited-> its goal: STOPPED, BACKOFF or FAILED; LOADING if wanted meanwhile
    BACKOFF -PauseOver-> LOADING          BACKOFF, FAILED -Halted-> STOPPED
    FAILED -Wanted-> LOADING              any state -Wanted-> itself, where it is already on its way

What may be trusted in each state:

    STOPPED   no child; `cause` is empty or why it was stopped
    LOADING   a child runs; its port may belong to somebody else still
    WARMING   the child answered 200 on its own port; clients must not reach it
    READY     loaded and warm (or `degraded` says why not warm): clients may reach it
    STOPPING  a child still runs and is being ended; nothing new may reach it
    BACKOFF   no child; one will be started after the pause that the last effect named
    FAILED    no child; `cause` says why; only a request or a person starts it again

Invariants:

    1. A child exists exactly in LOADING, WARMING, READY and STOPPING: `Start` is asked for only on
       the way into LOADING, and every way out of those four is an `Exited`.
    2. A first start that fails goes to FAILED at once: a bad model does not get better.
    3. READY is reached through WARMING only, after every restart again.
    4. An event that has no place in a state raises `IllegalMoveError` and changes nothing.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = [
    "Broken",
    "Effect",
    "Event",
    "Exited",
    "Halted",
    "Healthy",
    "IllegalMoveError",
    "Life",
    "Pause",
    "PauseOver",
    "RestartPolicy",
    "Start",
    "State",
    "Stop",
    "Wanted",
    "WarmUp",
    "Warmed",
    "step",
]


class State(enum.Enum):
    """Where a backend is; the values are the words of status pages and log lines."""

    STOPPED = "stopped"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"

    @property
    def live(self) -> bool:
        """Whether a child runs that is meant to serve."""
        return self in _LIVE

    @property
    def down(self) -> bool:
        """Whether no child runs, nor will before somebody wants one."""
        return self in _DOWN


_LIVE = frozenset({State.LOADING, State.WARMING, State.READY})
_DOWN = frozenset({State.STOPPED, State.FAILED})


class RestartPolicy(msgspec.Struct, frozen=True):
    """When a backend that failed is started again.

    The first restart in a window comes at once; later ones wait `base_s * 2 ** (n - 2)` seconds, at
    most `limit_s`. More than `burst` failures within `window_s` end in FAILED. The shape is that of
    systemd's `StartLimitBurst=` and of the OTP supervisors' restart intensity.

    Args:
        enabled: False for a plain child of another supervisor.
        burst: Restarts within the window before giving up.
        window_s: Length of the window in seconds.
        base_s: Pause before the second restart in a window, in seconds.
        limit_s: Longest pause, in seconds.
    """

    enabled: bool = True
    burst: int = 5
    window_s: float = 300.0
    base_s: float = 1.0
    limit_s: float = 60.0

    def pause_s(self, failures: int) -> float:
        """Return the pause before the next start after so many failures within the window."""
        if failures <= 1:
            return 0.0
        return min(self.base_s * 2.0 ** (failures - 2), self.limit_s)


class Life(msgspec.Struct, frozen=True):
    """All that is known of one backend's life.

    Args:
        state: Where it is.
        since_s: When it got there, on the caller's clock.
        cause: Why it is where it is, in words for a person; empty where nothing went wrong.
        degraded: Why the last warm-up failed although the backend serves; empty when it did not.
        ever_ready: Whether it has been READY since it was last started from STOPPED or FAILED.
        restarts: Starts after the first one, over the whole life.
        starts: Starts of all kinds; it numbers the children, so that late news of one is known.
        failures_s: Times of the failures inside the policy's window.
        wanted: While STOPPING: somebody asked for it again.
        broken: While STOPPING: it is being stopped because of `cause`, not on request.
    """

    state: State = State.STOPPED
    since_s: float = 0.0
    cause: str = ""
    degraded: str = ""
    ever_ready: bool = False
    restarts: int = 0
    starts: int = 0
    failures_s: tuple[float, ...] = ()
    wanted: bool = False
    broken: bool = False


class Wanted(msgspec.Struct, frozen=True):
    """Somebody needs the backend: the first start, a request, a person.

    Args:
        by: Who picked it, for the log; it decides nothing.
    """

    by: str = ""


class Healthy(msgspec.Struct, frozen=True):
    """The child answered 200 on `/health`, and it is the child that listens there."""


class Warmed(msgspec.Struct, frozen=True):
    """The warm-up is over.

    Args:
        degraded: Why it failed although the backend serves; empty when it did not.
    """

    degraded: str = ""


class Broken(msgspec.Struct, frozen=True):
    """The child lives but must not go on: too late, hung, unhealthy, on the wrong device.

    Args:
        cause: Why, in words for a person.
    """

    cause: str


class Halted(msgspec.Struct, frozen=True):
    """Somebody asked for the backend to be stopped.

    Args:
        if_idle: Only if it has nothing to do; it is the owner of the life who looks, and drops the
            event otherwise.
    """

    if_idle: bool = False


class Exited(msgspec.Struct, frozen=True):
    """The child is gone, or could not be started at all.

    Args:
        cause: How it ended and what it said last, in words for a person.
        again: The failure is known not to be the backend's (its port was taken): start at once,
            whatever the policy says.
    """

    cause: str
    again: bool = False


class PauseOver(msgspec.Struct, frozen=True):
    """The pause that BACKOFF waits for is over."""


class Start(msgspec.Struct, frozen=True):
    """Spawn a child and poll its health."""


class WarmUp(msgspec.Struct, frozen=True):
    """Send the child its warm-up."""


class Stop(msgspec.Struct, frozen=True):
    """End the child by the ladder."""


class Pause(msgspec.Struct, frozen=True):
    """Send `PauseOver` after so many seconds."""

    pause_s: float


Event = Wanted | Healthy | Warmed | Broken | Halted | Exited | PauseOver
Effect = Start | WarmUp | Stop | Pause
Move = tuple[Life, tuple[Effect, ...]]


class IllegalMoveError(Exception):
    """An event that has no place in the state it met: a bug of the caller."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{type(event).__name__} has no place in {state.name}")
        self.state = state
        self.event = event


def step(life: Life, event: Event, now_s: float, policy: RestartPolicy) -> Move:
    """Return the next life and what is to be done, in order.

    Args:
        life: The life so far; it is not changed.
        event: What happened.
        now_s: The caller's clock, in seconds; it must not run backwards.
        policy: When to start again after a failure.

    Returns:
        The new life, and the effects that the caller must carry out in this order.

    Raises:
        IllegalMoveError: The event has no place in this state; nothing changed.
    """
    state = life.state
    match event:
        case Wanted():
            return _wanted(life, now_s)
        case Healthy() if state is State.LOADING:
            return _to(life, State.WARMING, now_s), (WarmUp(),)
        case Warmed(degraded=degraded) if state is State.WARMING:
            ready = _to(life, State.READY, now_s, cause="", degraded=degraded, ever_ready=True)
            return ready, ()
        case Broken(cause=cause) if state.live:
            return _to(life, State.STOPPING, now_s, cause=cause, broken=True), (Stop(),)
        case Halted():
            return _halted(life, now_s)
        case Exited() if state.live or state is State.STOPPING:
            return _exited(life, event, now_s, policy)
        case PauseOver() if state is State.BACKOFF:
            return _start(life, now_s)
    raise IllegalMoveError(state, event)


def _to(life: Life, state: State, now_s: float, **changes: object) -> Life:
    return msgspec.structs.replace(life, state=state, since_s=now_s, **changes)


def _start(life: Life, now_s: float) -> Move:
    loading = _to(
        life,
        State.LOADING,
        now_s,
        degraded="",
        wanted=False,
        broken=False,
        starts=life.starts + 1,
        restarts=life.restarts + (life.starts > 0),
    )
    return loading, (Start(),)


def _wanted(life: Life, now_s: float) -> Move:
    match life.state:
        case State.STOPPED | State.FAILED:
            fresh = msgspec.structs.replace(life, ever_ready=False, failures_s=(), cause="")
            return _start(fresh, now_s)
        case State.STOPPING:
            return msgspec.structs.replace(life, wanted=True), ()
        case _:
            return life, ()


def _halted(life: Life, now_s: float) -> Move:
    match life.state:
        case State.LOADING | State.WARMING | State.READY:
            return _to(life, State.STOPPING, now_s, cause="", broken=False), (Stop(),)
        case State.STOPPING:
            return msgspec.structs.replace(life, wanted=False, broken=False, cause=""), ()
        case State.BACKOFF | State.FAILED:
            return _to(life, State.STOPPED, now_s), ()
        case _:
            return life, ()


def _exited(life: Life, event: Exited, now_s: float, policy: RestartPolicy) -> Move:
    stopping = life.state is State.STOPPING
    if stopping and not life.broken:
        if life.wanted:
            return _start(life, now_s)
        return _to(life, State.STOPPED, now_s), ()
    if event.again:
        return _start(life, now_s)
    cause = life.cause if stopping else event.cause
    failures_s = (*(t for t in life.failures_s if t > now_s - policy.window_s), now_s)
    failed = msgspec.structs.replace(life, cause=cause, failures_s=failures_s)
    if not policy.enabled or not life.ever_ready or len(failures_s) > policy.burst:
        return _to(failed, State.FAILED, now_s, wanted=False, broken=False), ()
    pause = Pause(policy.pause_s(len(failures_s)))
    return _to(failed, State.BACKOFF, now_s, wanted=False, broken=False), (pause,)
