"""Plan files of other machines on the pretended GPU: their entries are not trusted before they are verified."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.cublaslt import Status
from lt_runtime.epilogue import Epilogue
from lt_runtime.store.document import Document, Fingerprint
from lt_runtime.store.entries import Alternative, Entry, LayerEntry, ProductEntry, RejectedAlgorithm, RejectedStrategy
from lt_runtime.store.keys import field_types
from tests.host_kernels.harness import HostKernels
from tests.support.fake_cublaslt import ALGORITHM_IDS, Matmul
from tests.support.fake_gpu import FakeGpu
from tests.support.fp8_layers import CASES as FP8_CASES
from tests.support.fp8_layers import Fp8Layer
from tests.support.hurry import hurry
from tests.support.layer_checks import Layer, layer_case
from tests.support.matmul_checks import Product, matmul_case
from tests.support.over_fake_gpu import own
from tests.support.plan_entries import LATER

FIRST, OTHER = ALGORITHM_IDS[0], ALGORITHM_IDS[1]
GELU, PLAIN = layer_case(m=20), matmul_case(m=20)
FORWARD, BACKWARD = '{"ForwardProblem', '{"BackwardProblem'

for kind in (Alternative, Fingerprint, LayerEntry, ProductEntry, RejectedAlgorithm, RejectedStrategy):
    # Fills the cache of `field_types` now, because the pretended GPU replaces the module in which it looks names up.
    field_types(kind)

Change = Callable[[str, Any], Entry]
Merge = Callable[..., None]


@pytest.fixture(scope="module")
def measured(host: HostKernels, tmp_path_factory: pytest.TempPathFactory) -> Document:
    """Returns the entries that a machine has measured for a layer and for a product."""
    gpu = FakeGpu(host, tmp_path_factory.mktemp("theirs"))
    with gpu.active():
        with hurriedly_tuned(gpu):
            check_both(gpu)
        gpu.settle()
    return Document.read(plan_file(gpu))


@contextlib.contextmanager
def hurriedly_tuned(gpu: FakeGpu) -> Iterator[None]:
    """Tunes problems at their first use, with a clock that advances at each reading."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hurry(gpu, monkeypatch)
        with gpu.lt.tuning():
            yield


@pytest.fixture
def gpu(host: HostKernels, tmp_path: Path) -> Iterator[FakeGpu]:
    """Simulates a machine with an equal fingerprint that has measured nothing."""
    made = FakeGpu(host, tmp_path / "ours")
    with made.active():
        yield made
        made.settle()


def plan_file(gpu: FakeGpu) -> Path:
    (path,) = (gpu.directory / "plans").glob("*.json")
    return path


def changed(document: Document, change: Change) -> Document:
    """Returns the machine's entries as an attacker changes them, with recomputed digests."""
    made = Document(document.fingerprint)
    for key in document.raw:
        made.add(key, change(key, document.get(key)))
    return made


def plant(gpu: FakeGpu, document: Document) -> None:
    """Writes plans into this machine's own plan file."""
    directory = gpu.directory / "plans"
    directory.mkdir(0o700, parents=True)
    (directory / document.fingerprint.file_name).write_bytes(document.render())


@pytest.fixture
def merge(measured: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Merge:
    """Merges another machine's entries, changed by an attacker, into this machine's own by the command line."""

    def merge(change: Change, theirs: Document = measured) -> None:
        path, document = tmp_path / "theirs.json", changed(theirs, change)
        path.write_bytes(document.render())
        capsys.readouterr()
        assert own("cli").main(["cache", "merge", str(path), "--json"]) == 0
        (merged,) = json.loads(capsys.readouterr().out)["merged"]
        assert merged["changed"] == len(document.raw)

    return merge


def products_of(gpu: FakeGpu) -> dict[str, ProductEntry]:
    document = Document.read(plan_file(gpu))
    entries = {key: document.get(key) for key in document.raw}
    return {key: entry for key, entry in entries.items() if isinstance(entry, ProductEntry)}


def with_config(**values: int | None) -> Change:
    """Makes entries of products with another algorithm, which claim an unbeatable time; None removes an attribute."""

    def change(_: str, entry: Any) -> Entry:
        if isinstance(entry, LayerEntry):
            return entry
        config = {name: value for name, value in {**entry.config, **values}.items() if value is not None}
        return replace(entry, config=config, algorithm=bytes([7]) * 64, us=0.0, when=LATER, rejected=())

    return change


def check_both(gpu: FakeGpu) -> None:
    Layer(gpu, GELU, gpu.stream).check()
    Product(gpu, PLAIN, gpu.stream).check()


def ids(calls: list[Matmul]) -> set[int]:
    return {call.algorithm_id for call in calls}


STRATEGIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "another activation": (FORWARD, {"epilogue": "relu_bias"}),
    "no activation, and nothing kept": (FORWARD, {"epilogue": "bias", "saved": "nothing"}),
    "another derivative": (FORWARD, {"saved": "mask"}),
    "an epilogue of other products": (FORWARD, {"epilogue": "bgradb"}),
    "no bias gradient": (BACKWARD, {"db": "nobody"}),
    "a bias gradient below": (BACKWARD, {"db_below": "kernel"}),
}


@pytest.mark.parametrize(("kind", "values"), STRATEGIES.values(), ids=STRATEGIES)
def test_a_strategy_of_another_problem_is_not_used(
    gpu: FakeGpu, measured: Document, kind: str, values: Mapping[str, Any]
) -> None:
    def change(key: str, entry: Any) -> Entry:
        return replace(entry, strategy={**entry.strategy, **values}) if key.startswith(kind) else entry

    plant(gpu, changed(measured, change))
    with pytest.warns(UserWarning, match="has a damaged entry, which is not used .*strategies") as caught:
        Layer(gpu, GELU, gpu.stream).check()
    assert len(caught) == 1
    document = Document.read(plan_file(gpu))
    barred = [key for key in document.raw if (entry := document.get(key)) is not None and entry.barred is not None]
    assert len(barred) == 1
    assert barred[0].startswith(kind)


@pytest.mark.parametrize("epilogue", ["bias", "none"])
def test_a_measured_strategy_is_used_until_it_is_refused(gpu: FakeGpu, measured: Document, epilogue: str) -> None:
    def change(key: str, entry: Any) -> Entry:
        chosen = {**entry.strategy, "epilogue": epilogue} if key.startswith(FORWARD) else None
        return entry if chosen is None else replace(entry, strategy=chosen)

    plant(gpu, changed(measured, change))
    Layer(gpu, GELU, gpu.stream).check()
    (found,) = gpu.lt.explain([own("store.keys").parse_key(key) for key in measured.raw if key.startswith(FORWARD)])
    assert found.strategy.startswith(epilogue)
    again = FakeGpu(gpu.kernels._host, gpu.directory)  # simulates another process, whose cuBLASLt refuses all epilogues
    with again.active():
        again.library.refused = frozenset(range(2, 1024))
        Layer(again, GELU, again.stream).check()
        again.settle()
    barred = [str(entry.barred) for key in measured.raw if (entry := Document.read(plan_file(gpu)).get(key)).barred]
    assert any("offers 0" in reason for reason in barred) is (epilogue == "bias")


def test_tuning_takes_no_strategy_of_another_problem(gpu: FakeGpu, measured: Document) -> None:
    def change(key: str, entry: Any) -> Entry:
        if not key.startswith(FORWARD):
            return entry
        bad = {**entry.strategy, "epilogue": "relu_bias"}
        slower = tuple(replace(each, strategy=bad, us=entry.us) for each in entry.alternatives)
        return replace(entry, strategy=bad, alternatives=slower, when="2099-01-01T00:00:00Z")

    plant(gpu, changed(measured, change))
    with pytest.warns(UserWarning, match="has a damaged entry"), hurriedly_tuned(gpu):
        check_both(gpu)


def test_merged_algorithms_are_rebuilt_and_verified_before_they_run(gpu: FakeGpu, merge: Merge) -> None:
    merge(with_config(ID=OTHER))
    theirs = products_of(gpu)
    assert {entry.algorithm for entry in theirs.values()} == {b""}
    check_both(gpu)
    ours = products_of(gpu)
    assert {entry.config["ID"] for entry in ours.values() if entry.is_usable} == {OTHER}
    assert bytes([7]) * 64 not in {entry.algorithm for entry in ours.values()}
    assert bytes([7]) * 64 not in {call.algorithm for call in gpu.library.calls}
    gpu.library.calls.clear()
    check_both(gpu)
    assert ids(gpu.library.calls) == {OTHER}


def test_merged_algorithms_of_an_fp8_layer_run(host: HostKernels, tmp_path: Path, gpu: FakeGpu) -> None:
    case, theirs = FP8_CASES["current"], FakeGpu(host, tmp_path / "theirs")
    with theirs.active(), hurriedly_tuned(theirs):
        Fp8Layer(case, theirs.lt, theirs).step(0)
        theirs.settle()
    (tmp_path / "theirs.json").write_bytes(changed(Document.read(plan_file(theirs)), with_config(ID=OTHER)).render())
    assert own("cli").main(["cache", "merge", str(tmp_path / "theirs.json")]) == 0
    layer = Fp8Layer(case, gpu.lt, gpu)
    layer.step(0)
    gpu.synchronize_all()
    gpu.library.calls.clear()
    layer.step(1)
    gpu.synchronize_all()
    assert ids(gpu.library.calls) == {OTHER}


def test_merged_algorithms_that_are_wrong_never_make_a_result(gpu: FakeGpu, merge: Merge) -> None:
    def fault(call: Matmul) -> Matmul:
        return call._replace(alpha=1.001 * call.alpha) if call.algorithm_id == OTHER else call

    gpu.library.fault = fault
    merge(with_config(ID=OTHER))
    check_both(gpu)
    reasons = {entry.barred for entry in products_of(gpu).values()}
    assert {str(reason).partition(":")[0] for reason in reasons - {None}} == {"wrong"}
    assert not any(entry.is_usable for entry in products_of(gpu).values())
    gpu.library.calls.clear()
    check_both(gpu)
    assert ids(gpu.library.calls) == {FIRST}


CONFIGS: dict[str, Mapping[str, int | None]] = {
    "no algorithm": {"ID": None},
    "no such algorithm": {"ID": 99},
    "a negative algorithm": {"ID": -1},
    "a large algorithm": {"ID": (1 << 64) - 1},
    "no such attribute": {"SPEED": 11},
    "no such value": {"REDUCTION_SCHEME": 3},
    "a value that does not fit": {"CUSTOM_OPTION": 1 << 40},
    "padding that nothing needs": {"PADDED": 1},
    "two kinds of copies": {"PADDED": 1, "K_MAJOR": 1},
}


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_nothing_has_is_barred(gpu: FakeGpu, values: Mapping[str, Any], merge: Merge) -> None:
    merge(with_config(**values))
    check_both(gpu)
    entries = products_of(gpu).values()
    assert any(entry.barred for entry in entries)
    assert not any(entry.is_usable for entry in entries)


def test_our_own_kernel_is_verified_as_well(gpu: FakeGpu, merge: Merge) -> None:
    def change(_: str, entry: Any) -> Entry:  # names our narrow kernel as the method of products that it cannot compute
        return entry if isinstance(entry, LayerEntry) else replace(entry, config={"NARROW_MATMUL": 1})

    merge(change)
    check_both(gpu)
    reasons = {str(entry.barred) for entry in products_of(gpu).values() if entry.barred}
    assert all(reason.startswith("the kernel for narrow products does not take") for reason in reasons)
    assert reasons


def test_a_merged_algorithm_must_be_lean(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, merge: Merge) -> None:
    merge(with_config(ID=OTHER))
    plans = own("products.matmul").MatmulPlan
    monkeypatch.setattr(plans, "nodes", lambda *_: ["KERNEL"] * 3)
    check_both(gpu)
    reasons = {entry.barred for entry in products_of(gpu).values() if entry.barred}
    assert reasons == {"cannot be launched as at most two kernels and nothing else"}
    assert ids(gpu.library.calls) == {FIRST}


@contextlib.contextmanager
def refusing(name: str, status: Status) -> Iterator[None]:
    """During the verification a call of cuBLASLt returns an error status."""
    library = own("cublaslt.library")
    call = library.call

    def refuse(function: str, *arguments: Any, **named: Any) -> None:
        if function == name:
            raise library.failure(function, status)
        call(function, *arguments, **named)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(library, "call", refuse)
        yield


REFUSALS = (Status.INVALID_VALUE, Status.NOT_SUPPORTED, Status.ARCH_MISMATCH)
FAILURES = (Status.NOT_INITIALIZED, Status.ALLOC_FAILED, Status.EXECUTION_FAILED, Status.INTERNAL_ERROR)


@pytest.mark.parametrize("status", [*REFUSALS, *FAILURES])
def test_only_a_refusal_bars_a_measured_algorithm(gpu: FakeGpu, measured: Document, status: Status) -> None:
    plant(gpu, measured)
    before = products_of(gpu)
    with refusing("cublasLtMatmulAlgoCheck", status):
        if status in REFUSALS:
            Product(gpu, PLAIN, gpu.stream).check()
        else:
            with pytest.raises(gpu.lt.errors.CublasLtError, match=f"cublasLtMatmulAlgoCheck .*_{status.name} "):
                Product(gpu, PLAIN, gpu.stream).check()
    assert (products_of(gpu) == before) is (status in FAILURES)
    check_both(gpu)


@pytest.mark.parametrize("name", ["cublasLtMatmulAlgoInit", "cublasLtMatmulAlgoCheck"])
@pytest.mark.parametrize("status", [*REFUSALS, *FAILURES])
def test_only_a_refusal_bars_a_merged_algorithm(gpu: FakeGpu, name: str, status: Status, merge: Merge) -> None:
    merge(with_config(ID=OTHER))
    with contextlib.ExitStack() as stack:
        stack.enter_context(refusing(name, status))
        if status in FAILURES:
            stack.enter_context(pytest.warns(UserWarning, match=f"could not be verified .*{name} .*_{status.name} "))
        Product(gpu, PLAIN, gpu.stream).check()
    assert any(entry.barred for entry in products_of(gpu).values()) is (status in REFUSALS)
    assert ids(gpu.library.calls) == {FIRST}
    check_both(gpu)


def test_while_a_stream_is_captured_nothing_is_verified_and_nothing_unverified_is_used(
    gpu: FakeGpu, merge: Merge
) -> None:
    merge(with_config(ID=OTHER))
    proof = own("tuner.product_search")
    capture_error = own("errors").CaptureError

    def refuse(device: int) -> Any:
        raise capture_error("another stream is being captured")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(proof, "workbench", refuse)
        with pytest.warns(UserWarning, match="merged algorithms could not be verified and are not used .*captured"):
            Product(gpu, PLAIN, gpu.stream).check()
    assert ids(gpu.library.calls) == {FIRST}
    assert {entry.barred for entry in products_of(gpu).values()} == {None}


def test_what_is_verified_is_not_verified_again(gpu: FakeGpu, merge: Merge) -> None:
    merge(with_config(ID=OTHER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_both(gpu)
    again = FakeGpu(gpu.kernels._host, gpu.directory)  # simulates another process with the same plan files
    with again.active():
        check_both(again)
        assert ids(again.library.calls) == {OTHER}
        assert "lt_runtime.tuner.product_search" not in sys.modules
        again.settle()


def test_the_command_line_says_what_is_still_to_be_verified(
    gpu: FakeGpu, capsys: pytest.CaptureFixture[str], merge: Merge
) -> None:
    merge(lambda _, entry: entry)
    main, words = own("cli").main, "to be verified before its first use"
    assert main(["cache", "show", ""]) == 0
    assert words in capsys.readouterr().out
    check_both(gpu)
    for key, entry in products_of(gpu).items():
        assert main(["cache", "show", key]) == 0
        assert (words in capsys.readouterr().out) is not entry.is_usable


@pytest.mark.parametrize("epilogue", [Epilogue.GELU_AUX_BIAS, Epilogue.DRELU_BGRAD])
def test_products_with_an_epilogue(
    gpu: FakeGpu, host: HostKernels, tmp_path: Path, epilogue: Epilogue, merge: Merge
) -> None:
    case, theirs = matmul_case(m=20, epilogue=epilogue), FakeGpu(host, tmp_path / "tuned")
    with gpu.others_package(), theirs.active():
        with hurriedly_tuned(theirs):
            Product(theirs, case, theirs.stream).check()
        theirs.settle()
    merge(with_config(ID=OTHER), Document.read(plan_file(theirs)))
    Product(gpu, case, gpu.stream).check()
    gpu.library.calls.clear()
    Product(gpu, case, gpu.stream).check()
    assert ids(gpu.library.calls) == {OTHER}
