import sys
import time

BEGAN = time.time()
import numpy as np
import torch

sys.path[:0] = ["plugins/fdasync-transformers/tests/support", "plugins/fdasync-transformers/src", "benchmarks/_dev"]
from fdasync_transformers.sampling import sampler as S
from fdasync_transformers.sampling.math import sample_on_host
from old_sampling import math as OM
from old_sampling import plan as OP
from sampler_cases import spec

from fdasync.gpu.kernels.sampling import sample as K

ON = torch.cuda.is_available()
D = "cuda" if ON else "cpu"
V = 151936 if ON else 9001
ALL = [
    {"temperature": 1.0},
    {"temperature": 0.7, "raw": True, "top": 2},
    {"temperature": 1.0, "raw": True},
    {"temperature": 1.0, "top_p": 0.95, "processed": True, "top": 5},
    {"temperature": 1.0, "top_k": 50, "processed": True, "top": 5},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "processed": True},
    {"temperature": 1.0, "min_p": 0.05, "processed": True, "top": 4},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 1.0, "raw": True},
    {"bias": {2: 4.0, 9: -100.0, 999999: 1.0}, "raw": True, "processed": True},
    {"min_tokens": 9999, "stop_ids": (1, 4, 999999)},
    {"raw": True, "processed": True, "top": 3},
    {"temperature": 1.0, "top_p": 0.3, "raw": True, "top": 3},
    {"temperature": 1e-300, "top_p": 0.5},
    {"temperature": 50.0, "top_p": 1 - 2**-53, "processed": True},
    {"temperature": 1.0, "top_k": 3000, "processed": True},
    {"temperature": 1.0, "top_p": 0.999, "processed": True},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "raw": True, "processed": True},
]


def setup(own, n, hist, dev):
    plan = S.plan_samples(own, [len(hist[0])] * n, range(n))
    sent = {k: torch.from_numpy(a).to(dev) for k, a in plan.arrays.items()}
    return plan, sent


def check(name, logits, own, seed=0):
    n = len(own)
    rng = np.random.default_rng(seed)
    hist = rng.integers(-2, V + 2, (n, 200)).astype(np.int32)
    plan, sent = setup(own, n, hist, "cpu")
    b = sample_on_host(logits.cpu(), plan, sent, torch.from_numpy(hist))
    plan, sent = setup(own, n, hist, D)
    known = torch.from_numpy(hist).to(D)
    a = {k: v.cpu() for k, v in S.sample_on_device(logits, plan, sent, known).items()}
    bad = int((a["tokens"] != b["tokens"]).sum())
    err = [0.0, 0.0]
    for i, (k, w) in enumerate((("raw", plan.raw), ("processed", plan.processed))):
        w = torch.from_numpy(w)
        if w.any():
            err[i] = float((a[k][w] - b[k][w]).abs().max())
    tops = 0
    if "top_ids" in a:
        for r in range(len(plan.top_rows)):
            f = lambda d: sorted(int(i) for i, x in zip(d["top_ids"][r], d["top_values"][r]) if x > -np.inf)
            tops += f(a) != f(b)
    # alone, bit for bit
    alone = 0
    for i in list(range(0, n, max(1, n // 6)))[:7]:
        plan1, sent1 = setup(own[i : i + 1], 1, hist[i : i + 1], D)
        if plan1.plain:
            continue
        c = S.sample_on_device(logits[i : i + 1], plan1, sent1, known[i : i + 1])
        alone += (
            int(c["tokens"][0]) != int(a["tokens"][i])
            or (own[i].raw and float(c["raw"][0]) != float(a["raw"][i]))
            or (own[i].processed and float(c["processed"][0]) != float(a["processed"][i]))
        )
    print(
        f"check {name}: rows {n}, tokens that differ {bad}, err raw {err[0]:.1e} processed {err[1]:.1e}, tops {tops}, alone {alone}, finite {a['finite'].all().item() == b['finite'].all().item()}",
        flush=True,
    )


g = torch.Generator().manual_seed(1)
for name, mk in (
    ("flat bf16", lambda m: torch.randn(m, V, generator=g).bfloat16()),
    ("peaked f32", lambda m: torch.randn(m, V, generator=g) * 3),
    ("sharp bf16", lambda m: (torch.randn(m, V, generator=g) * 6).bfloat16()),
    ("ties", lambda m: torch.randint(0, 3, (m, V), generator=g).bfloat16()),
    ("uniform", lambda m: torch.zeros(m, V)),
):
    own = [spec(seed=i, **ALL[i % len(ALL)]) for i in range(36 if ON else 18)]
    check(name, mk(len(own)).to(D), own)
bad = torch.randn(4, V, generator=g).to(D)
bad[1, 7] = float("nan")
bad[2] = float("-inf")
bad[3, 5] = float("inf")
plan, sent = setup([spec(temperature=1.0, top_p=0.9, raw=True)] * 4, 4, np.zeros((4, 3)), D)
r = S.sample_on_device(bad, plan, sent, None)
print("finite", r["finite"].tolist(), "in range", bool(((r["tokens"] >= 0) & (r["tokens"] < V)).all()))
# float64 sort as the reference: the nucleus and the draw
x = torch.randn(8, V, generator=g).bfloat16()
own = [spec(seed=i, temperature=0.8, top_p=0.9, processed=True) for i in range(8)]
plan, sent = setup(own, 8, np.zeros((8, 5)), D)
r = S.sample_on_device(x.to(D), plan, sent, None)
worst = 0.0
wrong = 0
for i in range(8):
    l = x[i].double() / 0.8
    v, o = l.sort(descending=True, stable=True)
    p = torch.softmax(v, -1)
    keep = (p.cumsum(-1) - p) < 0.9
    q = torch.zeros(V, dtype=torch.float64)
    q[o[keep]] = p[keep]
    q /= q.sum()
    u = S.uniform(i, 0, 5)
    t = int(torch.searchsorted(q.cumsum(0), u, right=True))
    wrong += t != int(r["tokens"][i])
    worst = max(worst, abs(float(q[t].log()) - float(r["processed"][i])))
print("float64 sort: tokens that differ", wrong, "worst log-prob", f"{worst:.1e}", flush=True)
if not ON:
    sys.exit()


def timed(calls):
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for c in calls[:2]:
            c()
    torch.cuda.synchronize()
    gr = torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr):
        for c in calls:
            c()
    for _ in range(3):
        gr.replay()
    ts = []
    for _ in range(9):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        gr.replay()
        b.record()
        b.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / len(calls))
    del gr
    return sorted(ts)[4]


def cpu(call):
    ts = []
    for _ in range(5):
        torch.cuda.synchronize()
        t = time.perf_counter()
        call()
        ts.append((time.perf_counter() - t) * 1e6)
    torch.cuda.synchronize()
    return sorted(ts)[2]


KINDS = {
    "greedy": {},
    "greedy raw": {"raw": True},
    "temp1": {"temperature": 1.0},
    "temp1 raw": {"temperature": 1.0, "raw": True},
    "temp.7 raw top5": {"temperature": 0.7, "raw": True, "top": 5},
    "top_p.95": {"temperature": 1.0, "top_p": 0.95},
    "top_k50": {"temperature": 1.0, "top_k": 50},
    "k50 p.95": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    "min_p.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "grammar": {"temperature": 1.0, "grammar": b"x"},
}
for n in (256, 64, 1):
    for dist, sc in (("flat", 0.9), ("sharp", 4.0)):
        bufs = [(torch.randn(n, V, device=D) * sc).bfloat16() for _ in range(3)]
        hist = torch.randint(0, V, (n, 2000), device=D, dtype=torch.int32)
        masks = torch.randint(-(2**31), 2**31 - 1, (n, -(-V // 32)), device=D, dtype=torch.int32)
        for kind, ch in KINDS.items():
            if dist == "sharp" and (n < 256 or kind not in ("top_p.95", "top_k50")):
                continue
            own = [spec(seed=i, **ch) for i in range(n)]
            plan, sent = setup(own, n, np.zeros((n, 2000)), D)
            sent["masks"] = masks
            oldp = OP.plan_samples(own, [2000] * n, range(n))
            olds = {k: torch.from_numpy(a).to(D) for k, a in oldp.arrays.items()}
            olds["masks"] = masks
            new = [lambda b=b: S.compute_samples(b, plan, sent, hist) for b in bufs]
            old = [lambda b=b: OM.compute_samples(b.float(), oldp, olds, hist) for b in bufs[:2]]
            try:
                a = timed(new)
                c = cpu(new[0])
            except Exception as e:
                a = c = -1
                print(kind, repr(e)[:300])
            try:
                b = timed(old)
            except Exception:
                b = -1
            oc = cpu(old[0]) if n < 256 or kind == "temp1 raw" else 0
            print(
                f"{n:4d} {dist:5s} {kind:16s} now {a:8.1f} us (host {c:5.0f}), before {b:8.1f} (host {oc:5.0f})",
                flush=True,
            )
# by kernel
for dist, mk in (
    ("uniform", lambda: torch.zeros(64, V, device=D)),
    ("ties", lambda: torch.randint(0, 3, (64, V), device=D).float()),
):
    own = [spec(seed=i, temperature=1.0, top_p=0.95) for i in range(64)]
    plan, sent = setup(own, 64, np.zeros((64, 9)), D)
    x = mk()
    print(dist, 64, "rows top_p", round(timed([lambda: S.compute_samples(x, plan, sent, None)])), "us", flush=True)
print("checks and times done", round(time.time() - BEGAN), flush=True)
from torch.profiler import ProfilerActivity, profile

bufs = [(torch.randn(256, V, device=D) * 0.9).bfloat16() for _ in range(3)]


def kernels(kind, note=""):
    own = [spec(seed=i, **KINDS[kind]) for i in range(256)]
    plan, sent = setup(own, 256, np.zeros((256, 2000)), D)
    for b in bufs:
        S.compute_samples(b, plan, sent, None)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for b in bufs:
            S.compute_samples(b, plan, sent, None)
        torch.cuda.synchronize()
    print(
        note,
        kind,
        {
            e.key[:22]: round(e.device_time_total / 3)
            for e in sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[:9]
            if e.device_time_total > 3
        },
        flush=True,
    )


for kind in ("temp1 raw", "top_p.95", "top_k50"):
    kernels(kind)
for span, w in ((4096, 4), (8192, 8), (16384, 8)):
    K.SPAN = span
    K.WARPS["narrow"] = w
    kernels("top_p.95", f"span {span} w{w}")
K.SPAN = 8192
K.WARPS["narrow"] = 4
for d in ({"peaks": 4, "masses": 4, "list": 4, "cut": 8}, {"peaks": 16, "masses": 8, "list": 16, "cut": 4}):
    K.WARPS.update(d)
    kernels("top_p.95", str(d))
    if d["peaks"] == 16:
        kernels("temp1 raw")
