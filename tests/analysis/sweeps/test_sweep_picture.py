"""The pictures of a sweep."""

from __future__ import annotations

import io

from harness.analysis.sweeps.ranking import rank
from harness.analysis.sweeps.sweep_picture import curves
from tests.analysis.sweeps.job_logs import finished, job


def test_names_and_values_are_no_formulas() -> None:
    curves(rank([finished(job(lr="$5_$"), [1.0], losses=[3.0, 2.0])]), "cost$5_$10").savefig(io.BytesIO())
