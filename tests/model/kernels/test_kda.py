import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.kda import MIN_LOG_DECAY, bounded_log_decay, choose_implementation, kda

IMPLEMENTATIONS = ["reference", "chunk"]
LENGTHS = [1, 15, 16, 17, 63, 257]
NAMES = ("q", "k", "v", "g", "beta")
H, K, V = 2, 8, 12


def make_inputs(
    num_rows: int, num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32, g_scale: float = 1.0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_tokens, H)

    def normal(*last: int) -> Tensor:
        return torch.randn(*shape, *last, generator=generator)

    inputs = {
        "q": F.normalize(normal(K), dim=-1),
        "k": F.normalize(normal(K), dim=-1),
        "v": normal(V),
        "g": MIN_LOG_DECAY * torch.sigmoid(g_scale * normal(K)),
        "beta": torch.sigmoid(normal()),
    }
    return {name: x.to(dtype) for name, x in inputs.items()}


def make_state(num_sequences: int, seed: int = 1) -> Tensor:
    return torch.randn(num_sequences, H, K, V, generator=torch.Generator().manual_seed(seed))


def outputs_and_gradients(implementation: str, inputs: dict[str, Tensor], state: Tensor, **options) -> dict[str, Tensor]:
    """Return o, the last state, and the gradients of a loss that weighs every entry of both differently."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in {**inputs, "initial_state": state}.items()}
    o, last = kda(**leaves, output_final_state=True, implementation=implementation, **options)
    generator = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in (o, last))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "state": last, **dict(zip((f"d{name}" for name in leaves), gradients, strict=True))}


def definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One head of one sequence in the matrices of the paper's equation, FP64."""
    outputs = []
    for t in range(len(q)):
        identity = torch.eye(len(k[t]), dtype=torch.float64)
        state = (identity - beta[t] * torch.outer(k[t], k[t])) @ torch.diag(g[t].exp()) @ state + beta[t] * torch.outer(k[t], v[t])
        outputs.append(state.T @ q[t] * len(k[t]) ** -0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_output_and_state_are_those_of_the_definition(implementation: str, num_tokens: int) -> None:
    inputs, state = make_inputs(2, num_tokens), make_state(2)
    o, last = kda(**inputs, initial_state=state, output_final_state=True, implementation=implementation)
    for row, head in itertools.product(range(2), range(H)):
        one = {name: x[row, :, head].double() for name, x in inputs.items()}
        expected_o, expected_state = definition(**one, state=state[row, head].double())
        torch.testing.assert_close(o[row, :, head].double(), expected_o, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(last[row, head].double(), expected_state, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_chunks_agree_with_the_reference_in_value_and_every_gradient(num_tokens: int) -> None:
    inputs, state = make_inputs(3, num_tokens), make_state(3)
    expected, got = (outputs_and_gradients(name, inputs, state) for name in ("reference", "chunk"))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradients_are_those_of_finite_differences(implementation: str) -> None:
    inputs = {name: x.double().requires_grad_() for name, x in make_inputs(1, 19).items()}
    o, _ = kda(**inputs, implementation=implementation)
    assert o.dtype == torch.float64
    assert torch.autograd.gradcheck(lambda *args: kda(*args, implementation=implementation)[0], tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_sequences_are_what_each_is_alone_in_value_and_every_gradient(implementation: str) -> None:
    lengths = [17, 1, 0, 48, 16, 5]
    bounds = [0, *itertools.accumulate(lengths)]
    inputs, state = make_inputs(1, bounds[-1]), make_state(len(lengths))
    state_leaf = state.clone().requires_grad_()
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    cu_seqlens = torch.tensor(bounds)
    o, last = kda(**leaves, initial_state=state_leaf, cu_seqlens=cu_seqlens, output_final_state=True, implementation=implementation)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = {name: x[:, start:end].clone().requires_grad_() for name, x in inputs.items()}
        state_alone = state[i : i + 1].clone().requires_grad_()
        o_alone, last_alone = kda(**alone, initial_state=state_alone, output_final_state=True, implementation=implementation)
        torch.testing.assert_close(o[:, start:end], o_alone, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(last[i : i + 1], last_alone, atol=1e-6, rtol=1e-6)
        packed = torch.autograd.grad(o[:, start:end].sin().sum() + last[i].sum(), [*leaves.values(), state_leaf], retain_graph=True)
        single = torch.autograd.grad(o_alone.sin().sum() + last_alone.sum(), [*alone.values(), state_alone], materialize_grads=True)
        for name, whole, part in zip(NAMES, packed[:-1], single[:-1], strict=True):
            torch.testing.assert_close(whole[:, start:end], part, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
            assert not whole[:, :start].any(), f"{name} of an earlier sequence"
            assert not whole[:, end:].any(), f"{name} of a later sequence"
        torch.testing.assert_close(packed[-1][i], single[-1][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_token_never_changes_an_earlier_output_by_a_bit(implementation: str, dtype: torch.dtype) -> None:
    before, other = make_inputs(2, 70, dtype=dtype, g_scale=4.0), make_inputs(2, 70, seed=5, dtype=dtype, g_scale=4.0)
    o, _ = kda(**before, implementation=implementation)
    for t in (1, 7, 15, 16, 31, 33, 69):
        changed = {name: torch.cat([x[:, :t], other[name][:, t:]], dim=1) for name, x in before.items()}
        assert torch.equal(kda(**changed, implementation=implementation)[0][:, :t], o[:, :t]), f"token {t}"


@pytest.mark.parametrize(("implementation", "cuts"), [("reference", (1, 7, 16, 40)), ("chunk", (16, 32, 64))])
def test_a_prefill_in_two_parts_is_the_whole_to_the_bit(implementation: str, cuts: tuple[int, ...]) -> None:
    inputs, state = make_inputs(2, 70), make_state(2)
    o, last = kda(**inputs, initial_state=state, output_final_state=True, implementation=implementation)
    for cut in cuts:
        first, second = ({name: x[:, part] for name, x in inputs.items()} for part in (slice(0, cut), slice(cut, None)))
        o_first, between = kda(**first, initial_state=state, output_final_state=True, implementation=implementation)
        o_second, last_parts = kda(**second, initial_state=between, output_final_state=True, implementation=implementation)
        assert torch.equal(torch.cat([o_first, o_second], dim=1), o), f"cut at {cut}"
        assert torch.equal(last_parts, last), f"cut at {cut}"


def test_one_sequence_alone_and_among_eight_are_equal_to_the_bit_in_the_reference_and_close_in_chunks() -> None:
    inputs = make_inputs(8, 70)
    for implementation, tolerance in (("reference", 0.0), ("chunk", 1e-6)):
        together, _ = kda(**inputs, implementation=implementation)
        alone, _ = kda(**{name: x[3:4] for name, x in inputs.items()}, implementation=implementation)
        torch.testing.assert_close(together[3:4], alone, atol=tolerance, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("g", [MIN_LOG_DECAY, 0.0, -1e-6])
def test_saturated_gates_stay_finite_in_bfloat16(implementation: str, g: float) -> None:
    inputs = make_inputs(1, 100, dtype=torch.bfloat16)
    inputs["g"] = torch.full_like(inputs["g"], g)
    results = outputs_and_gradients(implementation, inputs, make_state(1))
    assert results["o"].dtype == torch.bfloat16
    assert all(x.isfinite().all() for x in results.values())
    exact = kda(**{name: x.double() for name, x in inputs.items()}, initial_state=make_state(1), implementation="reference")[0]
    torch.testing.assert_close(results["o"].double(), exact, atol=1e-2, rtol=1e-2)


def test_the_bounded_gate_stays_between_its_bounds_and_refuses_lower_ones() -> None:
    z, A_log, dt_bias = torch.randn(3, 5, H, K), torch.tensor([0.0, 1.0]), torch.randn(H * K)
    g = bounded_log_decay(z, A_log, dt_bias)
    torch.testing.assert_close(g[0, 0, 1, 2], -5 / (1 + (-(A_log[1].exp()) * (z[0, 0, 1, 2] + dt_bias[K + 2])).exp()))
    assert g.dtype == torch.float32
    assert (bounded_log_decay(z * 1e4, A_log, dt_bias) >= MIN_LOG_DECAY).all()
    for g_min in (-5.5, 0.0):
        with pytest.raises(ValueError, match=f"g_min must be at least -5 and below 0, got {g_min:g}"):
            bounded_log_decay(z, A_log, dt_bias, g_min)


def test_auto_names_what_it_picks() -> None:
    assert choose_implementation("auto", torch.device("cpu")) == "chunk"
    assert choose_implementation("reference", torch.device("cpu")) == "reference"
    with pytest.raises(ValueError, match="one of auto, reference, chunk, got 'fast'"):
        choose_implementation("fast", torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 3, 4)}, ValueError, r"q must have the shape \[B, T, H, K\], got \[2, 3, 4\]"),
        ({"k": torch.zeros(1, 4, H, K)}, ValueError, r"k must have the shape \[1, 5, 2, 8\] to fit q .* got \[1, 4, 2, 8\]"),
        ({"v": torch.zeros(1, 4, H, V)}, ValueError, r"v must have the shape \[1, 5, 2, 'V'\] .* got \[1, 4, 2, 12\]"),
        ({"g": torch.zeros(1, 5, H)}, ValueError, r"g must have the shape"),
        ({"beta": torch.zeros(1, 5, H, 1)}, ValueError, r"beta must have the shape \[1, 5, 2\]"),
        ({"v": torch.zeros(1, 5, H, V, dtype=torch.float16)}, TypeError, r"v must be float32 or bfloat16, got torch.float16"),
        ({"initial_state": torch.zeros(2, H, K, V)}, ValueError, r"initial_state .* = \[1, 2, 8, 12\], got \[2, 2, 8, 12\]"),
        ({"initial_state": torch.zeros(1, H, K, V, dtype=torch.bfloat16)}, TypeError, r"initial_state must be float32, got torch.bfloat16"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, ValueError, r"rise from 0 to the 5 tokens of the row, got \[0, 4, 3, 5\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"rise from 0 to the 5 tokens of the row, got \[0, 3\]"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, r"cu_seqlens must be one row of integers, got torch.float32"),
        ({"implementation": "flash"}, ValueError, r"implementation must be one of"),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_got(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kda(**{**make_inputs(1, 5), **changes})


def test_cu_seqlens_cuts_one_row_only() -> None:
    with pytest.raises(ValueError, match="got 2 rows: pack them into one"):
        kda(**make_inputs(2, 5), cu_seqlens=torch.tensor([0, 5]))
