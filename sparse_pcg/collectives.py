"""Capture with other ranks: every rank of a process group captures a graph, or none does.

NCCL wants a collective to be captured on all ranks or on none, and graphs that hold it to be launched by all. So before
a graph with collectives is compiled or captured the ranks compare what they are about to do, and between a capture and
its first launch each tells the others whether it worked. They talk through the group's store, not by collectives: that
works while a capture is broken, and a rank that does not answer is named.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import fx

from .errors import CaptureError, RankError, first_line
from .graphs import GraphDevice
from .liveness import STUCK, Watch, leave_process
from .memory import Pool
from .rewrite import overload_of

ENV = "SPARSE_PCG_RANK_TIMEOUT"  # seconds; see ``Ranks``
_TIMEOUT = 30.0


class Ranks:
    """The ranks of one process group, which act alike or not at all.

    store: a ``torch.distributed.Store`` that all ranks share and nothing else uses. index: this rank's number in the
    group. names: of each rank, for messages. timeout: seconds that ranks wait for one another in a capture, and after
    which one without a sign of life is lost; where they compile, and in a run, they wait 20 times as long. end: called
    in place of ending the process (see ``liveness``).

    Every method is called by all ranks in the same order.
    """

    def __init__(
        self,
        store: Any,
        index: int,
        names: Sequence[str],
        timeout: float = _TIMEOUT,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self.index, self.names, self.timeout = store, index, list(names), timeout
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        # By a connection of its own: what waits for a key on another one lets nobody else use that meanwhile.
        self.watch = Watch(store.clone(), index, self.names, timeout, end)

    def same(self, what: str, facts: Mapping[str, Any], patience: float = 1.0) -> None:
        """Raises RankError, on every rank, unless all ranks come to ``what`` with equal ``facts`` (as text).

        patience: how many time-outs to wait.
        """
        mine = {name: str(value) for name, value in facts.items()}
        for rank, theirs in enumerate(self._exchange(what, {"facts": mine}, patience)):
            for name in (*mine, *theirs["facts"]):
                here, there = mine.get(name, "nothing"), theirs["facts"].get(name, "nothing")
                if here != there:
                    raise RankError(
                        f"{what}: {self.names[rank]} differs in {name}: it has {there}, {self.names[self.index]} {here}"
                    )

    def vote(self, what: str, failure: str | None) -> str | None:
        """None if ``what`` succeeded on all ranks; else which rank failed first, by number, and why."""
        for rank, theirs in enumerate(self._exchange(what, {"failure": failure})):
            if theirs["failure"] is not None:
                return f"{self.names[rank]}: {theirs['failure']}"
        return None

    @contextmanager
    def running(self, what: str, device: torch.device | None) -> Iterator[None]:
        """Around a run with collectives. Raises RankError for a rank that is lost, before or in it."""
        watch = self.watch
        outermost = watch.enter(what)
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if not outermost:
                raise
            why = watch.explain(error)
            if why is not None:
                raise RankError(f"{what}: {why}") from error
            watch.failed(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise
        finally:
            watch.leave(device)

    def _exchange(self, what: str, message: dict[str, Any], patience: float = 1.0) -> list[dict[str, Any]]:
        """What every rank has to say, this one included, by number."""
        with self._lock:
            number = next(self._numbers)
            keys = [f"{number}/{rank}" for rank in range(len(self.names))]
            mine = {"what": what, **message}
            deadline = time.monotonic() + patience * self.timeout
            try:
                self.watch.check()
                self.watch.asking = what
                self._store.set(keys[self.index], json.dumps(mine))
                self._wait(what, keys, deadline)
                told = [json.loads(text) for text in self._store.multi_get(keys)]
            except BaseException as error:
                self._tell_withdrawn(keys[self.index], mine, error)
                self.watch.check()  # the store may be gone with the rank that kept it: that is what to say
                left = [why for rank in range(len(keys)) if rank != self.index and (why := self.watch.trouble(rank))]
                if left and not isinstance(error, RankError):
                    raise RankError(f"{what}: {left[0]}") from error
                raise
            finally:
                self.watch.asking = ""
            # All have read the last but one: they have answered the last.
            if number >= 2:
                self._store.delete_key(f"{number - 2}/{self.index}")
            for rank, theirs in enumerate(told):
                if "withdrawn" in theirs:
                    raise RankError(f"{what}: {self.names[rank]} gave up: {theirs['withdrawn']}")
                if theirs["what"] != what:
                    raise RankError(
                        f"{self.names[rank]} is at {theirs['what']!r}, {self.names[self.index]} at {what!r}"
                    )
            return told

    def _wait(self, what: str, keys: list[str], deadline: float) -> None:
        pause = 5e-5
        while not self._store.check(keys):
            self.watch.check()
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            for rank in missing:
                if (why := self.watch.trouble(rank)) and not self._store.check([keys[rank]]):
                    raise RankError(f"{what}: {why}")
            if missing and time.monotonic() > deadline:
                late = ", ".join(self.names[rank] for rank in missing)
                raise RankError(f"{what}: nothing from {late} in time; {self.names[self.index]} gives up")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def withdraw(self, what: str, error: BaseException) -> None:
        """In place of coming to ``what``: the others are told that, and why, this rank does not."""
        with self._lock:
            number = next(self._numbers)
            self._tell_withdrawn(f"{number}/{self.index}", {"what": what}, error)

    def _tell_withdrawn(self, key: str, mine: dict[str, Any], error: BaseException) -> None:
        """A rank that comes later must not take this one's message for an agreement."""
        with suppress(RuntimeError):  # no store, nobody to tell
            self._store.set(key, json.dumps({**mine, "withdrawn": first_line(error)}))

    def close(self, reason: str = "") -> None:
        """Leave: the others are told, and do not wait for this rank any more."""
        self.watch.close(reason)


def together(ranks: Ranks | None, what: str, values: Iterable[Any]) -> AbstractContextManager[None]:
    """Around a run on ``values`` that waits for other ranks; None: for nobody."""
    if ranks is None:
        return nullcontext()
    return ranks.running(what, next((v.device for v in values if isinstance(v, torch.Tensor)), None))


class Together:
    """A graph device whose captures take effect on all ranks or on none."""

    def __init__(self, device: GraphDevice, ranks: Ranks) -> None:
        self._device, self._ranks = device, ranks

    def new_pool(self) -> Pool:
        """The device's."""
        return self._device.new_pool()

    def session(self, pool: Pool) -> AbstractContextManager[None]:
        """The device's."""
        return self._device.session(pool)

    def capture(
        self,
        fn: Callable[..., Sequence[Any]],
        args: Sequence[Any],
        pool: Pool,
        ready: Callable[[], None] | None = None,
    ) -> tuple[Callable[[], Any], list[Any]]:
        """As the device's; raises CaptureError, with no effect, where any rank cannot."""
        voted = False

        def agreed() -> None:
            nonlocal voted
            voted = True
            self._vote(None)
            if ready is not None:
                ready()

        try:
            return self._device.capture(fn, args, pool, agreed)
        except CaptureError as error:
            if not voted:
                self._vote(str(error), error.__cause__ or error)
            raise
        except BaseException as error:  # an interrupt, say: this rank goes, and the others do not wait for its vote
            if not voted:
                self._ranks.withdraw("a capture", error)
            raise

    def _vote(self, failure: str | None, cause: BaseException | None = None) -> None:
        found = self._ranks.vote("a capture", failure)
        if found is not None:
            raise CaptureError(f"not captured on any rank, since it failed on one: {found}") from cause

    def refused(self, fn: Callable[..., Any], args: Sequence[Any], pool: Pool) -> bool:
        """The device's."""
        return self._device.refused(fn, args, pool)


def groups_of(graph: fx.Graph) -> list[str]:
    """Names of the process groups over which ``graph`` has collectives."""
    return list(dict.fromkeys(name for node in graph.nodes if (name := group_of(node)) is not None))


_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "symm_mem")  # of others a name may mean another thing


def group_of(node: fx.Node) -> str | None:
    """Name of the process group of a collective; None for other ops."""
    overload = overload_of(node)
    if overload is None or overload.namespace not in _NAMESPACES:
        return None
    for place, argument in enumerate(overload._schema.arguments):
        if argument.name == "group_name":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("group_name")
            return given if isinstance(given, str) else None
    return None


_known: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()
_formed: Counter[str] = Counter()  # groups by name: one that is formed anew finds the keys of the one before it


def ranks_of(graph: fx.Graph) -> Ranks | None:
    """The ranks that run ``graph`` together: of the group of its collectives, of all where there are several groups.

    None where it has no collectives, or only over this rank alone.
    """
    names = groups_of(graph)
    if not names:
        return None
    from torch.distributed import distributed_c10d

    groups = [distributed_c10d._resolve_process_group(name) for name in names]  # type: ignore[arg-type]
    groups = [group for group in groups if group.size() > 1 and torch.distributed.get_backend(group) != "fake"]
    if not groups:
        return None
    group = groups[0] if len(groups) == 1 else distributed_c10d._get_default_group()
    with _known_lock:
        if group not in _known:
            _formed[group.group_name] += 1
            prefix = f"sparse_pcg/{_formed[group.group_name]}"
            store = torch.distributed.PrefixStore(prefix, distributed_c10d._get_process_group_store(group))
            names = [f"rank {rank}" for rank in torch.distributed.get_process_group_ranks(group)]
            _known[group] = ranks = Ranks(store, group.rank(), names, timeout_from_env())
            weakref.finalize(group, _retire, ranks).atexit = False
            atexit.unregister(_leave_at_exit)
            atexit.register(_leave_at_exit)  # again: before what was registered since
        return _known[group]


def _retire(ranks: Ranks) -> None:
    """Its process group is no more. In a thread that the process waits for: whoever destroys a group does not."""
    threading.Thread(target=ranks.close, name="sparse_pcg retire").start()


def timeout_from_env() -> float:
    """Seconds from ``SPARSE_PCG_RANK_TIMEOUT``. Raises ValueError for what is no positive number."""
    given = os.environ.get(ENV, str(_TIMEOUT))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{ENV}: must be a positive number of seconds, got {given!r}")
    return seconds


def _leave_at_exit() -> None:
    """At the end of the process; an exception that nobody caught is what the others are told."""
    for ranks in reversed(list(_known.values())):
        ranks.close(_reason(getattr(sys, "last_value", None)))
        if ranks.watch.lost is not None:
            leave_process(1)  # the communicator's own end would wait for the rank that is lost


def leave_all(error: BaseException) -> None:
    """Leave every group, for ``error``: the others are told."""
    for ranks in list(_known.values()):
        ranks.close(_reason(error))


def _reason(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" if error is not None else ""


COMPILING = float(STUCK)  # patience where ranks compile: one may have a warm cache
