"""The objects that all machines of a simulated cluster share: time, network, metadata, trace and verdict."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout

from bindery_simulation.loop import Process, SimLoop
from bindery_simulation.network import Network
from bindery_simulation.service.healing.plan import HealingPlan
from bindery_simulation.service.metadata_tree import SimTree
from bindery_simulation.service.settings import BOOKIE_SETTINGS, client_settings
from bindery_simulation.service.verdict import Verdict
from bindery_simulation.trace import Trace


class Site:
    """The shared objects of one run. `healing`: plan of a cluster with auditors; None: no auditors."""

    def __init__(self, seed: int, *, trace: Trace, healing: HealingPlan | None) -> None:
        self.trace = trace
        self.healing = healing
        self.rng = rng = random.Random(seed)
        self.loop = SimLoop()  # type: ignore[abstract]  # the missing methods must not be used
        self.loop.on_advance = self._advanced
        self.network = Network(self.loop, random.Random(rng.getrandbits(64)), trace)
        self.loop.network = self.network
        self.layout = LedgersLayout()
        self.verdict = Verdict(trace)
        self.tree = SimTree(self.layout, random.Random(rng.getrandbits(64)), self.verdict.committed)
        self.client_settings = client_settings(rng)
        self.bookie_settings = BOOKIE_SETTINGS
        self.on_disk_lost: Callable[[str], None] = lambda name: None
        """Called with the name of a bookie when its disk is lost."""
        self.on_copies: Callable[[Process, LedgerId, BookieId, Sequence[int]], None] = lambda *_: None
        """Called with the process of a worker before it sends copies of these entries to a bookie."""

    def later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` after a delay, outside all processes."""
        self.network.at(delay_s, callback, *args)

    def _advanced(self, now: float) -> None:
        self.trace.now = now
