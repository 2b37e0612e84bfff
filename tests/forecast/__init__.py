"""Tests of the forecast of a training job."""
