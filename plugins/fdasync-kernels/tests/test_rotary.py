"""The rotary kernel against float64 and, bit for bit, the library's ways to rotate: `layer/rotary.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.layer.rotary import CONTRACTIONS, Style, rotate

from fdasync.errors import BadInput

# dtypes, and whether all of a head is rotated
CASES = [(torch.bfloat16, False), (torch.bfloat16, False), (torch.float16, True), (torch.float32, False)]
_STYLES = [
    Style(pairs, placed, table, trailing, wide)
    for pairs, placed in (("halves", "halves"), ("neighbours", "halves"), ("neighbours", "neighbours"))
    for table in ("own", "first", "pair")
    for trailing in (False, True)
    for wide in (False, True)
]
# one of every five first: these eight have every value of each field
STYLES = [*_STYLES[::5], *(style for number, style in enumerate(_STYLES) if number % 5)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: Style) -> torch.Tensor:
    """[T, H, D], by torch's operations, each of which rounds."""
    columns = cos.shape[-1]
    rotated = 2 * columns if style.table == "pair" else columns
    rest = x.shape[-1] - rotated
    turn, left = (x[..., rest:], x[..., :rest]) if style.trailing else (x[..., :rotated], x[..., rotated:])
    if style.pairs == "halves":
        a, b = turn.chunk(2, -1)
    else:
        a, b = turn[..., ::2], turn[..., 1::2]
    tables = []
    for table in (cos[:, None], sin[:, None]):
        if style.table != "own":
            mine = table[..., : rotated // 2], table[..., : rotated // 2]
        elif style.pairs == "halves":
            mine = tuple(table.chunk(2, -1))
        else:
            mine = table[..., ::2], table[..., 1::2]
        tables.append(tuple(each.float() for each in mine) if style.wide else mine)
    (cos_a, cos_b), (sin_a, sin_b) = tables
    if style.wide:
        a, b = a.float(), b.float()
    a, b = a * cos_a + -b * sin_a, b * cos_b + a * sin_b
    done = torch.cat([a, b], -1) if style.placed == "halves" else torch.stack([a, b], -1).flatten(-2)
    parts = [left, done.to(x.dtype)] if style.trailing else [done.to(x.dtype), left]
    return torch.cat(parts, -1)


def tensors(device: torch.device, dtype: torch.dtype, tokens: int, dim: int, columns: int, table: torch.dtype):
    q, k = normal(tokens, 5, dim), normal(tokens, 2, dim, seed=1)
    cos, sin = normal(tokens, columns, seed=2), normal(tokens, columns, seed=3)
    return q.to(device, dtype), k.to(device, dtype), cos.to(device, table), sin.to(device, table)


@pytest.mark.ci(after=8)
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_the_bits_are_the_librarys(device, style):
    for number, (dtype, whole) in enumerate(CASES):
        if style.trailing and whole:
            continue
        table = torch.float32 if number % 2 else dtype
        columns = (6 if style.table == "pair" else 12) if whole else (3 if style.table == "pair" else 6)
        q, k, cos, sin = tensors(device, dtype, 1 + 2 * number, 12, columns, table)
        ours = rotate(q, k, cos, sin, style)
        for mine, x in zip(ours, (q, k), strict=True):
            assert mine.dtype is dtype
            assert torch.equal(mine, in_torch(x, cos, sin, style)), (dtype, whole)
        exact = in_torch(q.double(), cos.double(), sin.double(), style._replace(wide=False))
        torch.testing.assert_close(ours[0].double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("poison")
def test_strides_and_dimensions_before(device):
    style = Style()
    q, k, cos, sin = tensors(device, torch.float32, 6, 16, 8, torch.float32)
    plain = rotate(q, k, cos, sin, style)
    first = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None], style, heads_first=True)
    for one, other, x in zip(plain, first, (q, k), strict=True):
        assert torch.equal(one, other[0].transpose(0, 1))
        assert other.stride()[1:] == x.transpose(0, 1).stride(), "in another order than the library's"
    wide = normal(6, 5, 40).to(device)
    wide[..., 4:36:2] = q
    tables = torch.stack([cos, sin], dim=-1)
    strided = rotate(wide[..., 4:36:2], None, tables[..., 0], tables[..., 1], style)
    assert torch.equal(strided[0], plain[0])
    assert strided[1] is None
    assert rotate(q[:0], k[:0], cos[:0], sin[:0], style)[1].shape == (0, 2, 16)


@pytest.mark.parametrize("contracted", CONTRACTIONS)
def test_complex_products(device, contracted):
    style = Style("neighbours", "neighbours", "pair", wide=True, contracted=contracted)
    q, k, cos, sin = tensors(device, torch.float32, 7, 16, 8, torch.float32)
    ours = rotate(q, k, cos, sin, style)
    for mine, x in zip(ours, (q, k), strict=True):
        exact = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None]
        torch.testing.assert_close(mine.double(), torch.view_as_real(exact).flatten(-2), rtol=0, atol=2e-6)
    # which product is exact shows where both are equal but for their rounding
    x = torch.tensor([1 + 2**-12, 1 + 2**-12], device=device).expand(1, 1, 2).contiguous()
    one = torch.full((1, 1), 1 + 2**-12, device=device)
    first, second = rotate(x, None, one, one, style)[0].flatten().tolist()
    lost = 2.0**-24
    assert first == {"": 0.0, "cos": lost, "sin": -lost}[contracted.partition(" ")[0]]
    assert second == pytest.approx(2 + 2**-10, abs=1e-6)


def test_bad_input_is_refused(device):
    q, k, cos, sin = tensors(device, torch.float16, 3, 8, 8, torch.float16)
    for field, refused in {
        "q": [
            lambda: rotate(q.double(), k, cos, sin, Style()),
            lambda: rotate(q[0], k, cos, sin, Style()),
            lambda: rotate(q[:, None].expand(3, 2, 5, 8), k, cos, sin, Style()),
        ],
        "k": [
            lambda: rotate(q, k[:2], cos, sin, Style()),
            lambda: rotate(q, k.float(), cos, sin, Style()),
            lambda: rotate(q, k[..., :4], cos, sin, Style()),
        ],
        "cos": [
            lambda: rotate(q, k, cos.double(), sin, Style()),
            lambda: rotate(q, k, cos[:2], sin, Style()),
            lambda: rotate(q, k, cos, sin, Style(table="pair")),
            lambda: rotate(q, k, cos[:, :3], sin[:, :3], Style()),
        ],
        "sin": [lambda: rotate(q, k, cos, sin[:, :4], Style()), lambda: rotate(q, k, cos, sin.float(), Style())],
    }.items():
        for each in refused:
            with pytest.raises(BadInput) as caught:
                each()
            assert caught.value.field == field


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("style", [Style(), Style("neighbours", "halves", "first")], ids=str)
def test_the_bits_of_a_token_alone_in_a_batch_and_padded(device, dtype, style):
    q, k = torch.randn((600, 32, 128), device=device).to(dtype), torch.randn((600, 4, 128), device=device).to(dtype)
    cos, sin = (torch.randn((600, 128), device=device).to(dtype) for _ in range(2))
    whole = rotate(q, k, cos, sin, style)
    assert torch.equal(whole[0], in_torch(q, cos, sin, style))
    assert torch.equal(whole[1], in_torch(k, cos, sin, style))
    for count in (1, 2, 17, 64, 255):
        for mine, all_of_them in zip(rotate(q[:count], k[:count], cos[:count], sin[:count], style), whole, strict=True):
            assert torch.equal(mine, all_of_them[:count])
        padded = [torch.cat([x[:count], torch.full_like(x[:64], float("nan"))]) for x in (q, k, cos, sin)]
        for mine, all_of_them in zip(rotate(*padded, style), whole, strict=True):
            assert torch.equal(mine[:count], all_of_them[:count])


@pytest.mark.gpu
def test_a_complex_product_of_torch_is_one_of_the_contractions(device):
    q, k, cos, sin = tensors(device, torch.float32, 33, 64, 32, torch.float32)
    library = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None])
    style = Style("neighbours", "neighbours", "pair", wide=True)
    same = [
        contracted
        for contracted in CONTRACTIONS
        if torch.equal(rotate(q, k, cos, sin, style._replace(contracted=contracted))[0], library.flatten(-2))
    ]
    assert len(same) == 1


@pytest.mark.gpu
def test_one_kernel_for_all_numbers_of_tokens_and_a_graph_replays_it(device):
    from fdasync_kernels.layer.rotary import _rotate_kernel

    def made(tokens):
        q, k = (torch.randn((1, tokens, heads, 128), device=device).transpose(1, 2) for heads in (32, 4))
        return q, k, torch.randn((1, tokens, 128), device=device), torch.randn((1, tokens, 128), device=device)

    given = made(64)
    rotate(*given, Style(), heads_first=True)
    kernels = [len(cache[0]) for cache in _rotate_kernel.device_caches.values()]
    for tokens in (1, 2, 16, 33):
        rotate(*made(tokens), Style(), heads_first=True)
    assert [len(cache[0]) for cache in _rotate_kernel.device_caches.values()] == kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = rotate(*given, Style(), heads_first=True)
    given[0].copy_(torch.randn_like(given[0]))
    graph.replay()
    assert torch.equal(turned[0], rotate(*given, Style(), heads_first=True)[0])
