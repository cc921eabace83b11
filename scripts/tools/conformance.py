"""Hold ours, torch's and others' Muons against what they claim, and store the verdicts: book/results/conformance.json.

Other implementations are tried where they are: installed beside torch (pip install --no-deps ...), or cloned from
github.com/KellerJordan/Muon and github.com/microsoft/dion into a folder that PEERS names. Those that are not here are
named.

python scripts/tools conformance --json book/results/conformance.json
PEERS=../peers python scripts/tools conformance --quick --json out/quick/conformance.json
"""

from muonbook.ch17.kit import conformance_bench


def main():
    """Examine everybody who is here, and write --json."""
    return conformance_bench.main(__doc__)
