"""The processes of a load, and what is done to them: kills, stops, takeovers by a second process of
the same name, steps of the wall clock, and a full disk.

A victim is struck only after it has done something in its life, so that each fault meets work and
not a process that is still starting. Whoever was killed is started again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

from tests.history.client import ClientSettings, run
from tests.history.faults import DISK_FULL, clock_file
from tests.history.history import WORK

SOON_S = 120.0
"""How long a process may take to start or to do something: long, on a busy machine."""
LOCKED_S = 10.0
"""How long nobody finishes anything while a process is stopped inside the log's lock."""
MORE_S = 300.0
"""How much longer the nemesis goes on, at most, for what the load has not met yet."""
MORE_PAUSE_S = 1.0
"""How long it then rests: a slow machine needs the time to meet it."""
PRELOADED = ("tests.history.client", "headrace.log.kafka", "pandas")
"""What a process imports before it works, so that it need not when it is started. PyArrow imports
pandas where it is installed.
"""
KEEPS_ID = ("write", "move", "copy")
"""Roles whose processes own an id, and so can be taken over."""


@dataclass
class Player:
    """A process and what it was started with."""

    settings: ClientSettings
    process: BaseProcess

    @property
    def history(self) -> Path:
        return self.settings.directory / f"{self.settings.process}.history"

    def work_done(self) -> int:
        """How often it has done more, in this life, than to open what it needs and to wait."""
        try:
            return self.history.read_text().count(f'"{WORK}": true')
        except FileNotFoundError:
            return 0

    def has_worked(self) -> bool:
        return self.work_done() > 0

    def signal(self, number: signal.Signals) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)


@dataclass
class Cast:
    """All processes of a load, one for each part."""

    parts: Sequence[ClientSettings]
    players: dict[str, Player] = field(default_factory=dict)
    zombies: list[Player] = field(default_factory=list)
    lives: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        # No process may inherit another one's open files.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    def start_all(self) -> None:
        for settings in self.parts:
            self.start(settings)

    def start(self, settings: ClientSettings) -> Player:
        """Start a process for a part, in its next life."""
        self.lives[settings.part] += 1
        settings = replace(settings, life=self.lives[settings.part])
        process = self._context.Process(target=run, args=(settings,), daemon=True)
        process.start()
        self.players[settings.part] = Player(settings, process)
        return self.players[settings.part]

    def restart_ended(self) -> None:
        """Start those again that ended because they were fenced, or their log was broken."""
        for player in list(self.players.values()):
            if not player.process.is_alive():
                self.check(player)
                self.start(player.settings)

    @staticmethod
    def check(player: Player) -> None:
        """Fail if a process ended with an error that no fault explains."""
        error = player.settings.directory / f"{player.settings.process}.error"
        assert not error.exists(), f"{player.settings.process}:\n{error.read_text()}"
        assert player.process.exitcode in {None, 0}, (
            f"{player.settings.process} ended with {player.process.exitcode}"
        )

    def finish(self, role: str, seconds: float) -> list[str]:
        """Let the processes of a role come to an end of their own. Returns who did not."""
        deadline = time.monotonic() + seconds
        parts = [settings for settings in self.parts if settings.role == role]
        for settings in parts:
            (settings.directory / f"stop-{role}").touch()
        for zombie in self.zombies:
            if zombie.settings.role == role:
                zombie.process.join(max(0.1, deadline - time.monotonic()))
                self.check(zombie)
        return [settings.part for settings in parts if not self._finish(settings.part, deadline)]

    def _finish(self, part: str, deadline: float) -> bool:
        """Wait for a process's end. One that ended without having been told to, because it was
        fenced or its log was broken, has left work behind for its next life.
        """
        while True:
            player = self.players[part]
            player.process.join(max(0.1, deadline - time.monotonic()))
            self.check(player)
            if player.settings.done_file.exists():
                return True
            if time.monotonic() > deadline:
                return False
            self.start(player.settings)

    def end(self) -> None:
        """End everybody, however they are."""
        for player in (*self.players.values(), *self.zombies):
            player.process.kill()
            player.process.join()


class Nemesis:
    """Strikes the cast, at random but for the seed."""

    def __init__(
        self,
        cast: Cast,
        directory: Path,
        *,
        seed: int,
        faults: Sequence[str],
        victims: Sequence[str],
    ) -> None:
        self._cast = cast
        self._directory = directory
        self._chance = Random(seed)
        self._victims = victims
        self._faults: list[Callable[[], None]] = [getattr(self, name) for name in faults]
        self._order: list[Callable[[], None]] = []
        self.struck: Counter[str] = Counter()
        """How often each fault met a process at work, by fault and role."""

    def run(
        self, seconds: float, *, pause_s: float, is_enough: Callable[[], bool] = lambda: True
    ) -> None:
        """Wait until everybody has worked. Then strike for so long, and on until each fault has met
        somebody at work and the load has met enough else.
        """
        for player in self._cast.players.values():
            assert self._until(player.has_worked), f"{player.settings.process} does nothing"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._strike(self._faults, pause_s)
        deadline += MORE_S
        while (missed := self._missed()) or not is_enough():
            if time.monotonic() > deadline:
                return
            self._strike(missed or self._faults, max(pause_s, MORE_PAUSE_S / 2))

    def _strike(self, faults: Sequence[Callable[[], None]], pause_s: float) -> None:
        """One fault. All have had their turn before one has another."""
        self._cast.restart_ended()
        if faults:
            self._order = [fault for fault in self._order if fault in faults]
            self._order = self._order or self._chance.sample(faults, len(faults))
            self._order.pop()()
        time.sleep(self._chance.uniform(0, 2 * pause_s))

    def _missed(self) -> list[Callable[[], None]]:
        """The faults that met nobody yet."""
        return [fault for fault in self._faults if not self.struck[fault.__name__]]

    def _victim(self, roles: Sequence[str] = ()) -> Player | None:
        """A process that has worked in this life: one of those that were struck least if it works
        soon, else whoever does.
        """
        players = [
            player
            for player in self._cast.players.values()
            if player.settings.role in self._victims
            and (not roles or player.settings.role in roles)
            and player.process.is_alive()
        ]
        players.sort(
            key=lambda player: (self._cast.lives[player.settings.part], self._chance.random())
        )
        for player in players[: max(2, len(players) // 2)]:
            if self._until(player.has_worked, 5.0):
                return player
        return next((player for player in players if player.has_worked()), None)

    def _until(self, condition: Callable[[], bool], seconds: float = SOON_S) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _count(self, fault: str, player: Player) -> None:
        self.struck[fault] += 1
        self.struck[f"{fault} {player.settings.role}"] += 1

    def kill(self) -> None:
        """SIGKILL, and the next life."""
        player = self._victim()
        if player is not None:
            time.sleep(self._chance.uniform(0, 0.1))
            player.process.kill()
            player.process.join()
            self._count("kill", player)
            self._cast.start(player.settings)

    def stop(self) -> None:
        """SIGSTOP for a moment: what was going on is late."""
        self._stop("stop", self._chance.uniform(0.05, 0.5))

    def stop_long(self) -> None:
        """SIGSTOP for so long that a group gives its member up."""
        self._stop("stop_long", 1.5)

    def _stop(self, fault: str, seconds: float) -> None:
        player = self._victim()
        if player is not None:
            player.signal(signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                player.signal(signal.SIGCONT)
            self._count(fault, player)

    def take_over(self) -> None:
        """Stop an owner of an id, start its successor, and let the old one go on when the new one
        has worked.
        """
        zombie = self._victim(KEEPS_ID)
        if zombie is not None and self._take_over(zombie):
            self._count("take_over", zombie)

    def _take_over(self, zombie: Player) -> bool:
        """Returns whether the successor worked while its predecessor was stopped. One that was
        stopped inside the log's lock holds up everybody, and goes on at once.
        """
        zombie.signal(signal.SIGSTOP)
        try:
            if not self._is_anybody_writing(zombie):
                return False
            successor = self._cast.start(zombie.settings)
            self._cast.zombies.append(zombie)
            has_worked = self._until(successor.has_worked)
        finally:
            zombie.signal(signal.SIGCONT)
        self._until(lambda: not zombie.process.is_alive(), 2.0)
        self._cast.check(zombie)
        return has_worked

    def _is_anybody_writing(self, stopped: Player) -> bool:
        """Whether another process finishes something that takes the log's lock, and soon."""
        others = [
            player
            for player in self._cast.players.values()
            if player is not stopped and player.settings.role in KEEPS_ID
        ]
        if not others:
            return True
        before = {player.history: player.work_done() for player in others}
        return self._until(
            lambda: any(player.work_done() > before[player.history] for player in others),
            LOCKED_S,
        )

    def set_clock(self) -> None:
        """The wall clock of a process jumps, and stays there until it is set again."""
        player = self._victim()
        if player is not None:
            file = clock_file(self._directory, player.settings.part)
            temporary = file.with_suffix(".new")
            temporary.write_text(str(self._chance.choice([-3600, -5, 0, 5, 3600])))
            temporary.replace(file)
            self._count("set_clock", player)

    def fill_disk(self) -> None:
        """No file grows for a while, whoever writes."""
        switch = self._directory / DISK_FULL
        switch.touch()
        try:
            time.sleep(self._chance.uniform(0.2, 0.5))
        finally:
            switch.unlink()
        self.struck["fill_disk"] += 1
