"""Tests of residual pages: saved tensors come back with their bits, what leaves follows from order and bytes
alone, and nothing is kept longer than autograd keeps it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from residual_rooms import ROOMS, LateTransfer, Saver
from torch import Tensor, nn

from infinity.activations.residual_pages import SMALLEST
from infinity.errors import BudgetError, StorageError

MIB = 1 << 20


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128))
            for _ in range(4)
        ]
    )


def gradients(model: nn.Module, saver: Saver | None, *, backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(128, 128, requires_grad=True)
    if saver is None:
        loss = model(x).square().mean()
    else:
        saver.pages.set_aside([x, *model.parameters()])
        with saver.saving():
            loss = model(x).square().mean()
    for number in range(backwards):
        loss.backward(retain_graph=number < backwards - 1)
    assert x.grad is not None
    return [x.grad, *[each.grad for each in model.parameters() if each.grad is not None]]


@pytest.mark.parametrize("window", [0, 300_000])
@pytest.mark.parametrize("ram", [MIB, 8 * MIB])
@pytest.mark.parametrize("kept", [0, MIB, 64 * MIB])
@pytest.mark.parametrize("kind", ROOMS)
def test_gradients_have_their_bits_and_nothing_is_left(kind: str, kept: int, ram: int, window: int) -> None:
    model = blocks()
    for backwards in (1, 2):
        plain = gradients(model, None, backwards=backwards)
        saver = Saver(kind, kept=kept, ram=ram, disk=64 * MIB, window=window)
        found = gradients(model, saver, backwards=backwards)
        assert all(map(torch.equal, plain, found))
        saver.check_nothing_left()
    assert saver.pages.counts.saved > 1_500_000
    assert (saver.pages.counts.down > 0) == (kept < 64 * MIB)
    assert saver.pages.counts.read > 0 or kept > 0 or ram > MIB


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.one_of(
        st.lists(st.just(40), min_size=1, max_size=30), st.lists(st.integers(16, 80), min_size=1, max_size=30)
    ),
    kept=st.integers(0, 40),
    ram=st.integers(80, 600),
    window=st.integers(0, 80),
)
def test_the_shortest_prefix_leaves_that_lets_the_rest_fit(
    sizes: list[int], kept: int, ram: int, window: int
) -> None:
    page = 4096
    saver = Saver("copies", kept=kept * page, ram=ram * page, disk=MIB * 64, window=window * page)
    held = []
    for size in sizes:
        held.append((torch.full((size * page // 4,), float(len(held))), size))
    references = [saver.pages.pack(tensor) for tensor, _ in held]

    def prefix(sizes: list[int], room: int) -> int:
        return next(count for count in range(len(sizes) + 1) if sum(sizes[count:]) <= room)

    # The newest stays beside the others, and leaves once it is not the newest.
    left = max(prefix(sizes[:count], kept + sizes[count - 1]) for count in range(1, len(sizes) + 1))
    left = min(left, len(sizes) - 1)
    assert saver.pages.counts.down == sum(sizes[:left]) * page
    written = max((prefix(sizes[:count], ram - window) for count in range(left + 1)), default=0)
    written_pages = saver.pages.counts.written // page
    if len(set(sizes)) == 1:
        assert written_pages == sum(sizes[:written])
    else:  # RAM may be free in pieces that are too small
        assert written_pages in [sum(sizes[:count]) for count in range(written, left + 1)]
    for number, reference in reversed(list(enumerate(references))):
        assert reference is not None
        assert bool((saver.pages.unpack(reference) == number).all())
        references[number] = None
        del reference
    assert saver.pages.counts.up == saver.pages.counts.down
    saver.check_nothing_left()


def test_micro_batches_that_run_together_come_back_in_the_order_of_their_backwards() -> None:
    saver, order, references = Saver("copies that wait", window=70_000), [], {}
    up = saver.room.up
    saver.room.up = lambda into, source: (
        order.append(float(source.view(torch.float32)[0])) or up(into, source)
    )
    turns = [(stage, number) for stage in range(3) for number in range(3)]
    for stage, number in turns:
        with saver.pages.in_turn(lambda turn=(stage, -number): turn):
            references[stage, number] = saver.pages.pack(torch.full((16384,), 3.0 * stage + number))
    saver.pages.pack(torch.zeros(16384))  # the newest stays
    used = [(stage, number) for stage in (2, 1, 0) for number in range(3)]
    backward = _in_backward(lambda: [saver.pages.unpack(references.pop(each)) for each in used])
    assert [float(each[0]) for each in backward] == [3.0 * stage + number for stage, number in used]
    assert order == [3.0 * stage + number for stage, number in used if (stage, number) != (2, 2)]


def _in_backward(function: Callable[[], Any]) -> Any:
    """Call a function within a backward, and return its result."""
    found, x = [], torch.zeros((), requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: found.append(function()))
    y.backward()
    return found[0]


# --- what autograd may do with what it has saved ------------------------------------------------------------


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*shape, requires_grad=True)


def _views(y: Tensor) -> Tensor:
    return y[:100].exp() * y[100:200].sin() + y.t()[:100].cos()


def _often(y: Tensor) -> Tensor:
    return y * y * y.exp() * y.sin()


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "square transpose": lambda x: (x * 2) @ (x * 2).t() @ (x * 3).t(),
    "views of one storage": lambda x: _views(x * 2),
    "a small view of a large storage": lambda x: (x * 2).exp()[3:5, ::7].sin(),
    "strides of zero": lambda x: (x[:1] * 2).expand(256, 256).exp() * x,
    "conjugate": lambda x: (torch.complex(x * 2, x * 3).conj() * torch.complex(x, x * 2)).abs(),
    "negative": lambda x: torch.complex(x * 2, x * 3).conj().imag * x.sin(),
    "real view of complex": lambda x: torch.view_as_real(torch.complex(x * 2, x * 3).exp()).exp().sum(-1),
    "half": lambda x: (x.half() * 2).exp().float() * x,
    "a mask": lambda x: torch.where(x * 2 > 0, x * 3, x.exp()),
    "the same tensor often": lambda x: _often(x * 2),
    "an output": lambda x: (x * 2).exp().exp().tanh().sigmoid(),
    "channels last": lambda x: torch.conv2d(
        (x * 2).view(1, 16, 64, 64).contiguous(memory_format=torch.channels_last), torch.ones(16, 16, 3, 3)
    ).exp(),
}


@pytest.mark.parametrize("kind", ROOMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_saved_tensors_come_back_as_they_were(name: str, kind: str) -> None:
    function = PROGRAMS[name]
    for kept in (0, MIB):
        plain, x = numbers(256, 256), numbers(256, 256)
        function(plain).sum().backward()
        saver = Saver(kind, kept=kept, ram=2 * MIB, disk=64 * MIB, window=100_000)
        with saver.saving():
            y = function(x).sum()
        y.backward()
        assert torch.equal(plain.grad.view(torch.int32), x.grad.view(torch.int32))  # some are NaN
        del y
        assert saver.pages.counts.saved
        saver.check_nothing_left()


def test_a_page_lives_as_long_as_its_references() -> None:
    saver, x = Saver(ram=8 * MIB), numbers(256, 256)
    with saver.saving():
        y = (x * 2).exp()
        z = y.sin().sum()
    assert saver.pages.counts.saved == 256 * 256 * 4  # one page for the result and what sin saves
    node: Any = y.grad_fn
    before = node._saved_result.clone()
    z.backward(retain_graph=True)
    assert torch.equal(node._saved_result, before)
    first, x.grad = x.grad, None
    z.backward()
    assert torch.equal(first, x.grad)
    del z, y, node
    saver.check_nothing_left()


def test_a_graph_that_is_dropped_or_used_in_part_gives_everything_back() -> None:
    for kind in ROOMS:
        saver, x = Saver(kind, ram=2 * MIB, disk=64 * MIB, window=100_000), numbers(256, 256)
        with saver.saving():
            middle = (x * 2).exp().sin().cos()
            first, second = middle.exp().sum(), middle.sin().sum()
        del second
        torch.autograd.grad(first, [middle], retain_graph=True)
        del first, middle
        saver.check_nothing_left()


def test_ram_is_lent_until_the_copy_of_a_page_that_is_gone_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver = Saver("copies that wait")
    copy = LateTransfer(lambda: None)  # keeps no memory, as a copy of a device that was let go
    monkeypatch.setattr(saver.room, "down", lambda into, source: copy)
    monkeypatch.setattr(saver.room, "let_go", lambda transfer: None)
    reference = saver.pages.pack(numbers(256, 256))
    assert reference is not None
    saver.pages.pack(numbers(256, 256))
    del reference
    assert saver.room.lent_ram == 4 * 256 * 256
    copy.wait()
    saver.check_nothing_left()


def test_edits_after_saving_are_found() -> None:
    for edit in (lambda y: y.mul_(2), lambda y: y[3].zero_(), lambda y: y.detach().add_(1)):
        saver, x = Saver(), numbers(256, 256)
        with saver.saving(), torch.no_grad():
            with torch.enable_grad():
                y = (x * 2).exp()
                z = y * 1
            edit(y)
        del z
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()
        del y
        saver.check_nothing_left()


def test_edits_through_data_do_not_reach_what_has_left() -> None:
    for kept, factor in ((0, 1.0), (MIB, 2.0)):
        saver, x = Saver("copies", kept=kept), numbers(256, 256)
        with saver.saving():
            y = (x * 2).exp()
            z = (y * x.detach()).exp().sum()
        before = y.detach().clone()
        y.data.mul_(2)
        assert torch.equal(y.grad_fn._saved_result, before * factor)
        del z


def test_an_edit_before_saving_makes_another_page() -> None:
    saver, x = Saver(), numbers(256, 256)
    plain = numbers(256, 256)
    for each, hooks in ((plain, None), (x, saver)):
        if hooks is not None:
            with hooks.saving():
                y = each * 2
                z = (y.detach() * each).sum()
                w = (y.detach().mul_(3) * each).sum()
        else:
            y = each * 2
            kept = y.detach().clone()
            z, w = (kept * each).sum(), (y.detach().mul_(3) * each).sum()
        if hooks is None:
            (z + w).backward()
    with pytest.raises(RuntimeError, match="inplace"):
        z.backward()
    w.backward()
    assert torch.equal(x.grad * 4 / 3, plain.grad) or torch.allclose(x.grad * 4 / 3, plain.grad)


def test_a_new_tensor_at_an_old_address_is_another_page() -> None:
    saver, references = Saver(ram=64 * MIB), []
    for number in range(20):
        tensor = torch.full((64, 256, 4), float(number))
        references.append(saver.pages.pack(tensor))
        del tensor
    for number, reference in enumerate(references):
        assert reference is not None
        assert bool((saver.pages.unpack(reference) == number).all())


def test_a_view_does_not_hold_its_storage() -> None:
    saver = Saver()
    tensor = torch.randn(4 * MIB // 4)
    storage = weakref.ref(tensor.untyped_storage())
    first = saver.pages.pack(tensor[:1000])
    second = saver.pages.pack(torch.randn(SMALLEST))
    wanted = tensor[:1000].clone()
    del tensor
    assert storage() is None
    assert saver.room.lent_ram == 4096
    assert first is not None
    assert second is not None
    assert torch.equal(saver.pages.unpack(first), wanted)


@pytest.mark.parametrize("kind", ROOMS)
def test_a_view_comes_back_with_its_alignment(kind: str) -> None:
    saver, storage, views = Saver(kind), torch.randn(MIB), []
    for offset in (1, 3, 16, 1000, 1024):
        views.append(storage[offset : offset + 1000])
        view = saver.pages.pack(views[-1])
        saver.pages.pack(torch.randn(SMALLEST))  # the newest stays
        assert torch.equal(saver.pages.unpack(view), views[-1])
        assert saver.pages.unpack(view).data_ptr() % 64 == views[-1].data_ptr() % 64
    assert saver.pages.counts.down > 5 * 4000  # they have left


def test_small_tensors_and_those_set_aside_stay() -> None:
    saver, buffer = Saver(), torch.zeros(SMALLEST)
    saver.pages.set_aside([buffer])
    assert saver.pages.pack(buffer) is None
    assert saver.pages.pack(buffer.view(2, -1).t()) is None
    assert saver.pages.pack(torch.zeros(SMALLEST // 4 - 1)) is None
    assert saver.pages.pack(torch.zeros(SMALLEST // 4)) is not None
    assert saver.pages.pack(torch.zeros(0)) is None


def test_tensors_without_plain_bytes_where_the_model_computes_stay() -> None:
    saver, rows = Saver(), torch.randn(SMALLEST // 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are to be removed from torch
        nested = torch.nested.nested_tensor([rows, rows], layout=torch.strided)
        quantized = torch.quantize_per_tensor(rows, 0.1, 0, torch.qint32)
    for each in (nested, quantized, rows.to("meta")):
        assert each.untyped_storage().nbytes() >= SMALLEST
        assert saver.pages.pack(each) is None
    assert saver.pages.pack(rows) is not None


def test_an_edit_that_only_another_counter_has_counted_makes_another_page() -> None:
    saver = Saver()
    first = torch.zeros(SMALLEST)
    second = first.data  # a counter of its own
    references = [saver.pages.pack(first), saver.pages.pack(torch.zeros(SMALLEST))]
    assert saver.pages.counts.down == first.nbytes
    first.add_(1)
    reference = saver.pages.pack(second)
    assert second._version == 0
    assert torch.equal(saver.unpack(reference), torch.ones(SMALLEST))
    assert len(references) == 2


def test_a_constant_that_every_step_saves_is_not_remembered_for_every_step() -> None:
    saver, constant = Saver(), torch.randn(SMALLEST)
    for _ in range(10):
        reference = saver.pages.pack(constant)
        assert torch.equal(saver.unpack(reference), constant)
        del reference
    (known,) = saver.pages._known.values()
    assert len(known.pages) == 1


def test_threads_share_the_pages() -> None:
    saver, model = Saver(ram=4 * MIB, disk=64 * MIB, window=100_000), blocks()
    plain = gradients(model, None)
    found: list[list[Tensor]] = []

    def run() -> None:
        own = blocks()
        x = torch.manual_seed(1) and torch.randn(128, 128, requires_grad=True)
        with saver.saving():
            loss = own.eval()(x).square().mean()
        loss.backward()
        found.append([each.grad for each in own.parameters() if each.grad is not None])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert len(plain) == len(found[0]) + 1
    saver.check_nothing_left()


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROOMS)
def test_no_room_is_a_budget_error_and_the_next_step_goes_on(kind: str) -> None:
    model = blocks()
    plain = gradients(model, None)
    saver = Saver(kind, ram=MIB, window=100_000)
    with pytest.raises(BudgetError, match="activations"):
        gradients(model, saver)
    saver.check_nothing_left()
    assert len(plain) == 1 + len(list(model.parameters()))


@pytest.mark.parametrize("kind", ROOMS)
def test_each_transfer_may_fail_and_costs_one_step(kind: str) -> None:
    model = blocks()
    plain = gradients(model, None)
    saver = Saver(kind, ram=MIB, disk=64 * MIB, window=300_000)
    gradients(model, saver)
    calls = saver.room.disk_calls
    assert calls > 4
    failed = 0
    for number in range(calls):
        saver.room.fail_in(number)
        try:
            found = gradients(model, saver)
        except StorageError:
            failed += 1
        else:
            assert all(map(torch.equal, plain, found))  # what failed was not needed
        saver.check_nothing_left()
        saver.room.fail_in(None)
        assert all(map(torch.equal, plain, gradients(model, saver)))
    assert failed > calls / 2
