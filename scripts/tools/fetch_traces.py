"""Download the public profiler traces of "Reproducing and Validating Distributed Muon", and check every byte.

Ten traces of torch.profiler (11 MB), each of five steps on 4 GPUs with NCCL: of all four ranks of Muon's run
and of AdamW's, and rank 0's of two asynchronous ones. Their author published them under the MIT licence in
JenWei0312/muon-distributed-reproducibility. They are fetched at one commit and compared with the SHA-256 known here:
what arrives is what this book's numbers were read from, or nothing is kept. Then:

python scripts/tools fetch_traces
python scripts/tools read_trace out/report-traces/*.json
"""

from pathlib import Path

from distmuon import launch
from muonbook import download

COMMIT = "c3e149aa48e631d7ebd2a0c21dd20841e17819af"
SOURCE = f"https://raw.githubusercontent.com/JenWei0312/muon-distributed-reproducibility/{COMMIT}/comparison"
FOLDER = Path("out/report-traces")
SHA256 = {
    "trace_muon_FULLSTEP_dp2_tp2_rank0.json": "c79bb06349c7bf2ff9a57bc4a8a6dbcc839e962b3ea72b17cd38d48568730d8e",
    "trace_muon_FULLSTEP_dp2_tp2_rank1.json": "8f83543a88a846f1b65683eca210d102301dea274f64e55fada9a00414f578d0",
    "trace_muon_FULLSTEP_dp2_tp2_rank2.json": "5d7319439c6c1a2b217414adba53eeb9125074efe37e94b0333ab06fd1a954d3",
    "trace_muon_FULLSTEP_dp2_tp2_rank3.json": "b8cf4fae61479cb0a8d2ad6e95f0f85f5ee7000ef9213ab5b425088a9cc5b225",
    "trace_muon_FULLSTEP_dp2_tp2_async_rank0.json": "6f869f366a3ba7849d28680d621fbfdceefcc1fb3a04324b55c025b1feaddedd",
    "trace_adamw_FULLSTEP_rank0.json": "c3f7598d2325adf098bc8a309b48849c390c2b884bc4b8443d1a065752e91a9d",
    "trace_adamw_FULLSTEP_rank1.json": "35f4a48864200040e4371e0aa1d181a3dfc90365c5a2a57903e02462929b01c7",
    "trace_adamw_FULLSTEP_rank2.json": "936ae66499bdf10e67e782bc4bada6cd2b5837c222c51305d498cb3172fd5ae3",
    "trace_adamw_FULLSTEP_rank3.json": "fa04b0b622431f67b056bcc6147381599d464937cc569cda8818f1ef924dbf5d",
    "trace_adamw_FULLSTEP_async_rank0.json": "eeaccd74978f27507ad517123833eff6558174c73d22af1c657e8daf267425da",
}


def main():
    launch.parser(__doc__).parse_args()
    for name, wanted in SHA256.items():
        path = FOLDER / name
        came = download.fetch([f"{SOURCE}/{name}"], path, wanted)
        print(f"{name}: {path.stat().st_size:,} bytes, checked" if came else f"{name}: here already, checked")
