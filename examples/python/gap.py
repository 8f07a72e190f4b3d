"""How far from the bound strategies are, over a few reshards: a table, and a plot where matplotlib is there.

python examples/python/gap.py [gap.png]
"""

import sys

import crossmesh as cm

STRATEGIES = ["sendrecv", "allgather", "broadcast:greedy", "flow"]
CASES = {
    "rows to columns": ("f32[4096,4096]@A{h:2,d:4}(h+d,_)", "f32[4096,4096]@B{h:2,d:4}(_,h+d)"),
    "to 2 replicas": ("f32[4096,4096]@A{h:2,d:4}(h+d,_)", "f32[4096,4096]@B{h:2,d:4}(d,_)"),
    "one to many": ("f32[4096,4096]@A{d:1}(_,_)", "f32[4096,4096]@B{h:3,d:2}(_,_)"),
    "fused": ("bf16[6144,4096]@A{fsdp:8}(fsdp,_)", "bf16[6144,4096]@B{dp:2,tp:4}(tp of 4096+1024+1024,_)"),
}

gaps = {case: [cm.plan(pair, strategy=strategy).gap for strategy in STRATEGIES] for case, pair in CASES.items()}
print(f"{'x the bound':16}" + "".join(f"{strategy:>18}" for strategy in STRATEGIES))
for case, row in gaps.items():
    print(f"{case:16}" + "".join(f"{gap:18.2f}" for gap in row))

if len(sys.argv) > 1:
    import matplotlib

    matplotlib.use("agg")  # into a file, without a screen
    import matplotlib.pyplot as plt

    width = 0.8 / len(STRATEGIES)
    for at, strategy in enumerate(STRATEGIES):
        plt.bar([i + at * width for i in range(len(gaps))], [row[at] for row in gaps.values()], width, label=strategy)
    plt.xticks([i + 0.4 for i in range(len(gaps))], list(gaps))
    plt.axhline(1.0, color="black", linewidth=0.8)
    plt.ylabel("predicted time over the lower bound")
    plt.legend()
    plt.savefig(sys.argv[1])
