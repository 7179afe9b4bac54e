# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this folder."""

from tests.helpers.implementations import implementation as implementation
