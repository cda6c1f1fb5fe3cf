"""What `ngram` promises, in the plainest way: every occurrence in a list, which is searched from its end."""

from __future__ import annotations

import numpy as np

from fdasync.drafting.ngram import NgramDrafter

WINDOW = 8


def packed(tokens):
    return np.array(tokens, "<i4").tobytes()


def column(values):
    return np.array(values, np.int64)


class ExactNgram(NgramDrafter):
    """The drafter without a chance of two n-grams at one place of a table: it numbers them as they come."""

    def __init__(self, config, limits):
        super().__init__(config, limits)
        self._numbered = {}

    def _slots(self, windows, owners):
        places = np.zeros((len(windows), len(self.config.orders)), np.int64)
        for row, (window, owner) in enumerate(zip(windows.tolist(), owners.tolist(), strict=True)):
            for at, order in enumerate(self.config.orders):
                gram = (owner, tuple(window[-order:]))
                places[row, at] = self._numbered.setdefault(gram, len(self._numbered) + 1)
        assert len(self._numbered) < len(self._table) // len(self.config.orders)
        return places + self._sections


class NaiveNgram:
    """Takes time and memory that grow with all tokens; the paths must be the drafter's."""

    def __init__(self, orders, path):
        self.orders, self.path = orders, path
        self.lead = path + WINDOW - 1
        self.prompts = {}
        self.entered = {}
        self.streams = {}

    def begin(self, key, prompt, answer, salt=""):
        name = (tuple(prompt), salt)
        stream = [-1] * self.lead + list(prompt)
        if name not in self.entered:
            self.entered[name] = []
            self._enter(name, stream, self.lead)
        self.prompts[key] = name
        self.streams[key] = stream[-self.lead :]
        self.take(key, answer)

    def take(self, key, tokens):
        stream = self.streams[key]
        old = len(stream)
        stream.extend(tokens)
        self._enter(self.prompts[key], stream, old)

    def propose(self, key, most):
        stream, entered = self.streams[key], self.entered[self.prompts[key]]
        for order in self.orders:
            for other, stop in reversed(entered):
                if other[stop - order : stop] == stream[-order:]:
                    return other[stop : stop + min(most, self.path)]
        return []

    def end(self, key, keep=False):
        name = self.prompts.pop(key)
        del self.streams[key]
        if not keep and name not in self.prompts.values():
            del self.entered[name]

    def _enter(self, name, stream, old):
        self.entered[name] += [(stream, stop - self.path) for stop in range(old + 1, len(stream) + 1)]
