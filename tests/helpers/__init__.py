# SPDX-License-Identifier: Apache-2.0
"""Oracles, meshes and fixtures shared by the suites."""
