# SPDX-License-Identifier: Apache-2.0
"""One compiled training step on a (dp, cp) mesh, and the loop around it."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ulysses

from . import data
from .config import ConfigError, TrainConfig
from .transformer import Transformer, next_token_loss

_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
_WARM_UP_STEPS = 20
_VALID_BATCHES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step reports.

    Attributes:
      step: Index of the step, from 0.
      loss: Mean cross-entropy over the global batch, in nats per token.
      grad_norm: Global norm of the gradients before clipping.
      seconds: Wall time of the step.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float


def make_mesh(dp: int, cp: int) -> Mesh:
    """Returns a (dp, cp) mesh over the first devices, with Explicit axes.

    Explicit axes put every array's layout into its type: an activation that is not
    sharded over cp by mistake is an error while tracing and not a silent all-gather.
    `UlyssesAttention` makes the axes manual for its own part.

    Raises:
      ConfigError: If there are fewer devices than dp * cp.
    """
    devices = jax.devices()
    if len(devices) < dp * cp:
        platform = devices[0].platform
        hint = "" if platform == "cpu" else "; JAX_PLATFORMS=cpu takes virtual ones"
        raise ConfigError(
            f"dp {dp} x cp {cp} needs {dp * cp} devices, there are {len(devices)} "
            f"of platform {platform}{hint}"
        )
    return jax.make_mesh((dp, cp), ("dp", "cp"), devices=devices[: dp * cp])


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.lr,
        warmup_steps=min(_WARM_UP_STEPS, config.steps // 4),
        decay_steps=config.steps,
        end_value=0.1 * config.lr,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=_decayed),
    )


def _decayed(params) -> Any:
    """Marks matrices for weight decay; norm scales and biases keep their size."""

    def is_matrix(path, _) -> bool:
        names = jax.tree_util.keystr(path)
        return not any(name in names for name in ("scale", "bias", "sink"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


class Trainer:
    """A model, its optimizer and its compiled step on one mesh.

    Args:
      config: The run's settings.
      corpus: The text.

    Raises:
      ConfigError: If the mesh needs more devices than there are.
    """

    def __init__(self, config: TrainConfig, corpus: data.Corpus):
        self.config = config
        self.corpus = corpus
        self.mesh = make_mesh(config.dp, config.cp)
        self._optimizer = _optimizer(config)
        self._compiled: Any = None
        with jax.set_mesh(self.mesh):
            self._graph = nnx.graphdef(nnx.eval_shape(self._model))

    def _model(self) -> Transformer:
        return Transformer(
            self.config.model,
            token_order=self.config.token_order,
            implementation=self.config.implementation,
            dtype=_DTYPES[self.config.dtype],
            rngs=nnx.Rngs(self.config.seed),
        )

    def _new_state(self) -> dict[str, Any]:
        params = nnx.state(self._model(), nnx.Param)
        return {"params": params, "opt_state": self._optimizer.init(params)}

    def init_state(self) -> dict[str, Any]:
        """Returns fresh parameters and optimizer state, replicated on the mesh."""
        with jax.set_mesh(self.mesh):
            replicated = NamedSharding(self.mesh, PartitionSpec())
            return jax.jit(self._new_state, out_shardings=replicated)()

    def abstract_state(self) -> dict[str, Any]:
        """Returns shapes, types and shardings of the state, for a restore."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        with jax.set_mesh(self.mesh):
            shapes = jax.eval_shape(self._new_state)
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated),
            shapes,
        )

    def put_state(self, host_state) -> dict[str, Any]:
        """Returns a copy, on this mesh, of a state of NumPy arrays."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        # A copy by JAX: the step donates its state, and NumPy's memory is not ours.
        put = jax.device_put(host_state, replicated)
        return jax.tree.map(lambda array: array.copy(), put)

    def put_batch(self, tokens: np.ndarray, targets: np.ndarray):
        """Returns a batch as [B over dp, S over cp], in the run's token order."""
        if self.config.token_order is jax_ulysses.TokenOrder.ZIGZAG:
            order = _zigzag_order(tokens.shape[1], self.config.cp)
            # Targets move with their tokens; positions follow in the attention.
            tokens, targets = tokens[:, order], targets[:, order]
        sharded = NamedSharding(self.mesh, PartitionSpec("dp", "cp"))
        return jax.device_put((tokens, targets), sharded)

    def loss(self, params, tokens, targets) -> jax.Array:
        """Returns the mean loss of a global batch; differentiable."""
        return next_token_loss(nnx.merge(self._graph, params)(tokens), targets)

    def _step(self, state, tokens, targets):
        loss, grads = jax.value_and_grad(self.loss)(state["params"], tokens, targets)
        updates, opt_state = self._optimizer.update(
            grads, state["opt_state"], state["params"]
        )
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return {"params": params, "opt_state": opt_state}, metrics

    def compile(self) -> Any:
        """Compiles the step, once; returns the `jax.stages.Compiled`."""
        if self._compiled is None:
            with jax.set_mesh(self.mesh):
                batch = self.put_batch(*self._train_batch(0))
                step = jax.jit(self._step, donate_argnums=0)
                self._compiled = step.lower(self.abstract_state(), *batch).compile()
        return self._compiled

    def _train_batch(self, step: int):
        config = self.config
        return data.train_batch(
            self.corpus,
            seed=config.seed,
            step=step,
            batch=config.batch,
            seq_len=config.seq_len,
        )

    def run(
        self, state, first_step: int, on_step: Callable[[StepRecord, Any], bool]
    ) -> Any:
        """Trains from `first_step` to the end.

        Args:
          state: Parameters and optimizer state; donated.
          first_step: Index of the first step to do.
          on_step: Called after each step with its record and the state after it;
            returns True to stop there.

        Returns:
          The last state.
        """
        step_fn = self.compile()
        with jax.set_mesh(self.mesh):
            for step in range(first_step, self.config.steps):
                start = time.perf_counter()
                batch = self.put_batch(*self._train_batch(step))
                state, metrics = step_fn(state, *batch)
                metrics = jax.device_get(metrics)
                record = StepRecord(
                    step=step,
                    loss=float(metrics["loss"]),
                    grad_norm=float(metrics["grad_norm"]),
                    seconds=time.perf_counter() - start,
                )
                if on_step(record, state):
                    break
        return state

    def validate(self, params) -> float:
        """Returns the mean loss, in nats per token, on held-out text."""
        config = self.config
        with jax.set_mesh(self.mesh):
            loss = jax.jit(self.loss)
            losses = [
                loss(
                    params,
                    *self.put_batch(
                        *data.valid_batch(
                            self.corpus,
                            index=index,
                            batch=config.batch,
                            seq_len=config.seq_len,
                        )
                    ),
                )
                for index in range(_VALID_BATCHES)
            ]
            return float(np.mean(jax.device_get(losses)))


@functools.cache
def _zigzag_order(seq_len: int, num_ranks: int) -> np.ndarray:
    """Returns which token of the plain sequence stands at each place."""
    plain = jnp.arange(seq_len)
    return np.asarray(jax_ulysses.to_zigzag(plain, num_ranks, axis=0))
