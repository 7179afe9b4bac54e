# SPDX-License-Identifier: Apache-2.0
"""XLA FFI targets of jax_ulysses and the peer groups behind them.

Everything that touches XLA's foreign function interface stops here. This package
imports nothing else of jax_ulysses.
"""
