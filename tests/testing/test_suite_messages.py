"""What the conformance suites say when they fail: what happened, and not only what should have.

An adopter sees the message and nothing else: pytest looks into the assertions of test modules, not into those of an
installed package.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fdasync.testing
from fdasync.cache.store.base import DONE, Outcome
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing.harness.verdicts import check, equal, in_words
from tests.runner import test_synthetic as runners
from tests.support.suite_messages import message_of, silent_assertions
from tests.testing import test_store_suite as stores

pytestmark = pytest.mark.ci

FOLDER = Path(fdasync.testing.__file__).parent
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
SUITES = sorted(path for room in ("stores", "runners") for path in (FOLDER / room).glob("*.py"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_test_of_a_suite_imports_what_the_suite_needs(path):
    # in the midst of an adopter's run, behind tests that failed, the import of a large library may go wrong
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _FUNCTIONS)]
    tests = [function for function in functions if function.name.startswith("test_")]
    assert not [each for test in tests for each in ast.walk(test) if isinstance(each, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("path", SUITES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_assertion_of_a_suite_says_what_happened(path):
    assert not (silent := silent_assertions(path)), "\n".join(silent)


@pytest.mark.parametrize(
    ("store", "test", "said"),
    [
        ("CountsThosePresent", "test_exists_counts_the_leading_run", "it returned 14 instead of 6"),
        ("SaysDoneForWhatExists", "test_a_key_twice_in_one_call", "it returned ['done', 'done'] instead of ['done', "),
        ("AnswersForHitsOnly", "test_outcomes_are_in_the_order_of_the_items", "16 items: it returned [done, "),
        ("RaisesForWhatIsMissing", "test_what_is_missing_is_no_error", "get_into raised KeyError("),
        ("WritesWholeWords", "test_parts_are_joined_in_order_whatever_their_cut", "it is 0x00 instead of 0xa5"),
        ("SwallowsCancellation", "test_a_cancelled_put_leaves_it_whole_or_absent", "turns of the loop raises Cancelle"),
        ("KeepsTheCallersBuffer", "test_the_buffer_is_the_callers_again_after_a_put", "it returned 50000 bytes eeee"),
        ("DropsWhatItKept", "test_what_is_put_is_read", "it returned 'miss' instead of 512 bytes"),
        ("TakesAnyKey", "test_what_breaks_the_contract_is_refused", "key '' was taken: it returned [done]"),
        ("GrowsWithoutEnd", "test_a_full_store_stays_right", "it returned StoreUsage(objects=40, "),
        ("SaysFullWithoutAWord", "test_a_full_store_stays_right", "it returned full"),
        ("WorksWhenClosed", "test_verbs_after_aclose_say_so", "exists_prefix of a closed store: it returned 0"),
        ("TakesKeysForPaths", "test_a_key_may_begin_another", "it returned 'failed' instead of 'done'"),
        ("RevivesWhatWasDeleted", "test_what_was_done_is_there_after_its_end", "9d0125dec3be8d76... instead of 'miss'"),
    ],
)  # fmt: skip
def test_a_broken_store_is_told_what_it_did(store, test, said):
    suite = stores.SuiteInVirtualTime()
    suite.store = getattr(stores, store)
    assert said in message_of(suite, test)


@pytest.mark.parametrize(
    ("way", "test", "said"),
    [
        ("noise by batch", "test_noise_is_of_seed_index_and_position_alone", "it returned ["),
        ("copies move rows", "test_swapped_out_and_in_elsewhere_blocks_answer_as_before", "it returned 3 instead of 0"),
        ("copies nothing", "test_a_copy_that_makes_no_sense_fails", "raises RunnerError: it returned CopyOutput("),
        ("takes any tensor", "test_tensors_that_do_not_fit_change_nothing", "were taken: it returned None"),
    ],
)
def test_a_broken_runner_is_told_what_it_did(way, test, said):
    class Suite(runners.TestSynthetic):
        def make(self, limits):
            runner = runners._Broken(SyntheticConfig(**self.config), limits)
            runner.way = way
            return runner

    assert said in message_of(Suite(), test)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"abc", "3 bytes 616263"),
        (bytes(9), "9 bytes 0000000000000000..."),
        ("miss", "'miss'"),
        ([DONE, Outcome("failed", "no room", transient=True)], "[done, failed (no room; transient)]"),
        ((b"", 1), "(0 bytes , 1)"),
        ([(1,)], "[(1,)]"),
        ("x" * 1000, f"'{'x' * 399}..."),
    ],
)
def test_values_in_messages_are_short(value, text):
    assert in_words(value) == text


def test_what_is_right_is_not_told():
    equal([1], [1], "one")
    check(1, "one", 1)
    with pytest.raises(AssertionError, match=r"^x: it returned 2 bytes 0001 .* 2 bytes 0002; byte 1 differs"):
        equal(b"\0\1", b"\0\2", "x")
    with pytest.raises(AssertionError, match=r"^x: it returned None$"):
        check(False, "x", None)
