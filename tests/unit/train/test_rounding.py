"""Random bits and stochastic rounding of AdamW's moments."""

import pytest
import torch
from torch import Tensor

from eagle3.train.rounding import from_float8, make_keys, random_bits, root_to_float8, to_bfloat16, to_float8

COUNT = 1 << 20
LEVELS = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # of e4m3, from 0 to 448


def halves(begin: int = 0, step: int = 1, number: int = 0, count: int = COUNT) -> tuple[Tensor, Tensor]:
    return random_bits(begin, count, make_keys(step, number))


def draws(value: Tensor, times: int) -> Tensor:
    """16-bit numbers [times, *value.shape]."""
    return torch.stack([halves(step=time, count=value.numel())[0].view(value.shape) for time in range(times)])


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])


def test_every_bit_is_one_half_of_the_time() -> None:
    for half in halves(step=7, number=3):
        for bit in range(16):
            assert abs(float((half >> bit & 1).double().mean()) - 0.5) < 5 * 0.5 / COUNT**0.5


def test_the_numbers_are_uniform() -> None:
    for half in halves(step=7, number=3):
        counts = torch.bincount(half >> 4, minlength=4096).double()
        chi_squared = float(((counts - COUNT / 4096).square() / (COUNT / 4096)).sum())
        assert abs(chi_squared - 4095) < 5 * (2 * 4095) ** 0.5
        assert int(half.min()) >= 0 and int(half.max()) <= 65535


@pytest.mark.parametrize("lag", [1, 2, 3, 256, 7168])
def test_neighbours_are_independent(lag: int) -> None:
    first, second = halves(step=5)
    for one, other in ((first, first), (second, second), (first, second)):
        assert abs(correlation(one[lag:], other[:-lag])) < 5 / COUNT**0.5
    joint = (first[lag:] >> 12) * 16 + (first[:-lag] >> 12)
    counts = torch.bincount(joint, minlength=256).double()
    assert float(((counts - counts.mean()).square() / counts.mean()).sum()) < 255 + 5 * (2 * 255) ** 0.5


def test_steps_parameters_and_moments_are_independent() -> None:
    first, second = halves(step=1, number=0)
    others = [halves(step=2)[0], halves(step=3)[0], halves(number=1)[0], halves(begin=1 << 32)[0], second]
    for other in others:
        assert abs(correlation(first, other)) < 5 / COUNT**0.5
        assert abs(float((first == other).double().mean()) * 65536 - 1) < 5 * (65536 / COUNT) ** 0.5


def test_one_elements_numbers_over_steps_are_uniform_and_independent() -> None:
    numbers = torch.stack([halves(begin=12345, step=step, count=1)[0][0] for step in range(1, 20001)])
    counts = torch.bincount(numbers >> 8, minlength=256).double()
    assert float(((counts - counts.mean()).square() / counts.mean()).sum()) < 255 + 5 * (2 * 255) ** 0.5
    assert abs(correlation(numbers[1:], numbers[:-1])) < 5 / 20000**0.5


def test_a_flipped_bit_of_the_elements_number_flips_every_bit_half_of_the_time() -> None:
    count = 1 << 14
    base = halves(count=count)
    for bit in range(14, 32):
        other = halves(begin=1 << bit, count=count)
        for one, two in zip(base, other, strict=True):
            for place in range(16):
                flipped = float(((one ^ two) >> place & 1).double().mean())
                assert abs(flipped - 0.5) < 0.05, (bit, place, flipped)


def test_the_numbers_depend_on_nothing_but_step_parameter_and_element() -> None:
    whole = halves(step=9, number=2, count=5000)
    part = halves(begin=1234, step=9, number=2, count=100)
    for one, other in zip(whole, part, strict=True):
        assert torch.equal(one[1234:1334], other)
    # Runs of earlier versions go on with these:
    assert make_keys(9, 2) == (1489138070, 1835115866)
    assert torch.stack(halves(step=9, number=2, count=3)).tolist() == [[28999, 50227, 29492], [21658, 4509, 18878]]


def test_bfloat16_is_right_in_the_mean_and_one_of_its_two_neighbours() -> None:
    value = torch.tensor([1.001, -1.003, 3.14159, -2e-5, 1e-38, 3e-41, 7e30])
    found = torch.stack([to_bfloat16(value, draw) for draw in draws(value, 4000)]).double()
    spacing = value.bfloat16().double().abs() * 2**-7
    assert (found.mean(0) - value).abs().le(spacing.clamp(min=2**-133) * 5 * 0.5 / 4000**0.5).all()
    assert all(len(column.unique()) == 2 for column in found.T)


def test_what_bfloat16_can_hold_stays_as_it_is() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    for draw in (0, 65535):
        assert torch.equal(to_bfloat16(finite.float(), torch.full(finite.shape, draw, dtype=torch.int32)), finite)


def test_bfloat16_keeps_what_is_not_finite_and_makes_nothing_infinite() -> None:
    odd = torch.tensor([0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaNs
    value = torch.cat([torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38]), odd])
    found = to_bfloat16(value, torch.full(value.shape, 65535, dtype=torch.int32)).float()
    assert found[:2].tolist() == [torch.inf, -torch.inf]
    assert found[2:4].isfinite().all() and found[4:].isnan().all()


def blocks(*values: float) -> Tensor:
    """A block that begins with these values, and whose last one is 448, so that its scale is 1."""
    block = torch.zeros(1, 256)
    block[0, : len(values)] = torch.tensor(values)
    block[0, -1] = 448.0
    return block


def test_float8_is_right_in_the_mean_and_one_of_its_two_neighbours() -> None:
    """Also among subnormal numbers, below 2^-6 and below the least of them."""
    given = [1.01, -3.3, 447.0, -0.0157, 0.0101, -0.0021, 0.0011, 1e-4, 0.0]
    value = blocks(*given)
    found, scales = zip(*(to_float8(value, draw) for draw in draws(value, 4000)), strict=True)
    read = torch.stack([from_float8(*pair)[0, : len(given)] for pair in zip(found, scales, strict=True)]).double()
    spacing = torch.stack([(item.abs() < LEVELS).logical_not().sum() for item in value[0, : len(given)]])
    spacing = (LEVELS[spacing.clamp(max=126)] - LEVELS[spacing - 1]).double()
    assert ((read.mean(0) - value[0, : len(given)]).abs() <= spacing * 5 * 0.5 / 4000**0.5).all()
    assert [len(column.unique()) for column in read.T] == [2] * 8 + [1]


def test_the_square_of_a_root_in_float8_is_right_in_the_mean() -> None:
    given = [1.01, 3.3, 447.0, 0.0157, 0.0101, 0.0041, 0.0022]
    root = blocks(*given)
    square = root.square()
    read = torch.stack(
        [from_float8(*root_to_float8(square, root, draw))[0, : len(given)] for draw in draws(root, 4000)]
    )
    mean, error = read.double().square().mean(0), read.double().square().std(0) / 4000**0.5
    assert ((mean - square[0, : len(given)]).abs() <= 5 * error + 1e-9).all()
    assert (error > 0).all()


def test_a_root_is_zero_only_if_it_was() -> None:
    root = blocks(0.0, 1e-30, 1e-12, 1e-4, 1e-3)
    for draw in (0, 65535):
        stored, scale = root_to_float8(root.square(), root, torch.full(root.shape, draw, dtype=torch.int32))
        read = from_float8(stored, scale)[0]
        assert read[0] == 0
        assert (read[3:5] > 0).all()
    tiny = torch.full((1, 256), 1e-20)
    tiny[0, 0] = 1.0
    stored, scale = root_to_float8(tiny.square(), tiny, torch.zeros(1, 256, dtype=torch.int32))
    assert (from_float8(stored, scale) > 0).all()


@pytest.mark.parametrize("exponent", [-126, -60, 0, 60, 119])
def test_every_level_stays_as_it_is_at_every_scale(exponent: int) -> None:
    value = torch.cat([LEVELS, -LEVELS, torch.tensor([448.0, -448.0])])[None] * 2.0**exponent
    for draw in (0, 65535):
        random = torch.full(value.shape, draw, dtype=torch.int32)
        stored, scale = to_float8(value, random)
        assert scale == 2.0**exponent
        assert torch.equal(from_float8(stored, scale), value)
        if -60 <= exponent <= 50:  # where the squares are in float32's range
            stored, scale = root_to_float8(value.square(), value.abs(), random)
            assert torch.equal(from_float8(stored, scale), value.abs())


def test_a_scale_brings_the_largest_magnitude_just_below_448() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(500, 256, generator=generator) * 10.0 ** torch.randint(-30, 30, (500, 1), generator=generator)
    _, scale = to_float8(value, torch.zeros(value.shape, dtype=torch.int32))
    largest = value.abs().amax(1) / scale
    assert (largest <= 448).all() and (largest > 224).all()
    assert (scale.log2() == scale.log2().round()).all()


def test_zero_blocks_and_float32s_smallest_and_largest_numbers() -> None:
    largest = torch.finfo(torch.float32).max
    value = torch.zeros(4, 256)
    value[1, 0], value[2, :2], value[3, 0] = 1e-45, torch.tensor([largest, -largest]) * 0.93, 1e-38
    for draw in (0, 65535):
        random = torch.full(value.shape, draw, dtype=torch.int32)
        for stored, scale in (to_float8(value, random), root_to_float8(value.abs(), value.abs().sqrt(), random)):
            read = from_float8(stored, scale)
            assert read.isfinite().all() and scale.isfinite().all() and (scale > 0).all()
            assert (read[0] == 0).all() and (read[:, 2:] == 0).all()
    assert from_float8(*to_float8(value, torch.zeros(value.shape, dtype=torch.int32)))[2, 0] > 0.87 * largest


def test_what_is_not_finite_spoils_itself_only() -> None:
    value = torch.ones(2, 256)
    value[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    random = torch.full(value.shape, 65535, dtype=torch.int32)
    for stored, scale in (to_float8(value, random), root_to_float8(value.abs(), value.abs(), random)):
        read = from_float8(stored, scale)
        assert read[0, :3].isnan().all()
        assert (read[0, 3:] == 1).all() and (read[1] == 1).all()
