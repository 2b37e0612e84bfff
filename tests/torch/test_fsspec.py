"""Tests of `diesel://`: fsspec's own suite, and what users see of versions, links, errors, forks."""

import errno
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests
from hypothesis import given, settings
from hypothesis import strategies as st

from diesel_fs.client.dataset import connect
from diesel_fs.errors import CorruptError, DieselError, ObjectStoreError, UsageError
from diesel_fs.ingest.put import PutOptions, put
from diesel_fs.ingest.sources.folder import FolderSource
from diesel_fs.repository.local import LocalRepository
from diesel_fs.torch import fsspec as ours
from diesel_fs.torch.fsspec import DieselFileSystem
from tests.server.program import running_server
