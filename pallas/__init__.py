# SPDX-License-Identifier: Apache-2.0
"""Mosaic GPU kernels: GEMMs that read and write the exchange layout in place."""
