"""Tests of power cuts: the project runs under a kernel that loses all unsynced bytes."""
