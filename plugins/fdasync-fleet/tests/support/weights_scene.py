"""Instances under a router that say which weights they have."""

from __future__ import annotations

from tests.support.router_scene import NAMESPACE, done, settle, standing, status_of


def serve(*scripts):
    for script in scripts:
        script.answers = lambda submit, script=script: script.end(submit.request, (7,))


def problems(scene):
    return {one.name: one.problem for one in scene.router.stats().instances}


def dropped(scene):
    return {one.address: one.problem for one in scene.router.stats().dropped}


async def come_back(scene, name, namespace=NAMESPACE):
    """Another process takes its place, and does at first nothing that it is told."""
    scene.scripts[name].die()
    await settle(4.0)
    script = scene.begin(name, namespace)
    script.obeys = None
    await settle(2.0)
    return script


def namespace_of(version):
    return b"version %8d" % version if version else NAMESPACE


class Sleeper:
    """Has a script obey as an engine does that may sleep: weights come only where there is memory for them.

    Attributes:
        told: (verb, tags) of sleeps and wakes, (verb, label) of other commands.
        version: of its weights.
        fails: error of its next wake; "": it succeeds.
        late: error of its wakes after its memory has come back; "": they succeed.
        refuses: error of updates; "": they succeed.
        deltas: versions that are deltas to the one before.
        lacks: what it does when it is awake, having no weights, so that it takes no delta; "": it has some.
    """

    def __init__(self, script, deltas=()):
        self.script = script
        self.told = []
        self.version = 0
        self.fails = self.late = self.refuses = ""
        self.deltas = deltas
        self.lacks = ""
        self._released = set()
        script.obeys = self._obey

    @property
    def state(self):
        return "asleep" if self._released else self.lacks or "running"

    def _obey(self, command):
        error = ""
        asleep = command.verb in ("sleep", "wake")
        self.told.append((command.verb, command.tags if asleep else command.version))
        if command.verb == "sleep":
            self._released |= set(command.tags or ("weights", "kv_cache", "cuda_graph"))
            self.lacks = self.lacks or "waits_for_weights" * (command.level == 2)
        elif command.verb == "wake" and self.fails:
            error, self.fails = self.fails, ""
        elif command.verb == "wake":
            self._released -= set(command.tags or self._released)
            error = self.late
            if error == "WeightsBroken":
                self.lacks = "broken"
        elif command.verb == "update_weights":
            error = "Asleep" if "weights" in self._released else self.refuses
            if self.lacks and command.order in self.deltas:
                error = error or "WeightsRejected"
            if not error:
                self.version, self.lacks = command.order, ""
                self.script.namespace, self.script.version = namespace_of(self.version), self.version
        self.script.status = status_of(self.state)
        reply = done(command.number, error, "no", namespace_of(self.version), self.version)
        return standing(reply, state=self.state, is_delta=self.version in self.deltas)
