# SPDX-License-Identifier: Apache-2.0
"""One compiled training step on a (dp, cp) mesh, and the loop around it."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jax_ulysses
from jax_ulysses.local_attention import local_attention
from jax_ulysses.reductions import heap_axes

from . import data
from .config import ConfigError, TrainConfig
from .optimizer import make_optimizer
from .placement import AXES, make_mesh, put, zigzag_order
from .report import StepRecord
from .transformer import Transformer, next_token_loss

_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
_TOKENS = PartitionSpec(*AXES)
_VALID_BATCHES = 4


class Trainer:
    """A model, its optimizer and its compiled step on one mesh.

    Args:
      config: The run's settings.
      corpus: The text.
      devices: Where to run; None takes the devices of all processes.

    Raises:
      ConfigError: If the mesh needs more devices than there are, or the attention
        other ones.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: data.Corpus,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.config = config
        self.corpus = corpus
        self.mesh = make_mesh(config.dp, config.cp, devices)
        platform = self.mesh.devices.flat[0].platform
        if config.attention == "cudnn" and platform != "gpu":
            raise ConfigError(
                f"attention cudnn needs GPUs, these devices are {platform}"
            )
        self._optimizer = make_optimizer(config)
        with jax.set_mesh(self.mesh):
            self._graph = self._graphdef()

    def _graphdef(self):
        return nnx.graphdef(nnx.eval_shape(self._model))

    def _model(self) -> Transformer:
        return Transformer(
            self.config.model,
            token_order=self.config.token_order,
            implementation=self.config.implementation,
            attention_fn=functools.partial(
                local_attention, implementation=self.config.attention
            ),
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
        placed = put(host_state, NamedSharding(self.mesh, PartitionSpec()))
        # A copy by JAX: the step donates its state, and NumPy's memory is not ours.
        return jax.tree.map(lambda array: array.copy(), placed)

    def put_batch(self, tokens: np.ndarray, targets: np.ndarray):
        """Returns a batch as [B over dp, S over cp], in the run's token order."""
        if self.config.token_order is jax_ulysses.TokenOrder.ZIGZAG:
            order = zigzag_order(tokens.shape[1], self.config.cp)
            # Targets move with their tokens; positions follow in the attention.
            tokens, targets = tokens[:, order], targets[:, order]
        return put((tokens, targets), NamedSharding(self.mesh, _TOKENS))

    def loss(self, params, tokens, targets) -> jax.Array:
        """Returns the mean loss of a global batch; differentiable."""
        return next_token_loss(nnx.merge(self._graph, params)(tokens), targets)

    def _heap_sums(self) -> bool:
        """Whether the heap of a peer group sums losses and gradients, not XLA."""
        return bool(heap_axes(AXES, self.config.reductions))

    def _whole_loss(self, params, tokens, targets):
        """The loss of a global batch, however it is summed."""
        if not self._heap_sums():
            return self.loss(params, tokens, targets)
        return self._on_each_rank(self._own_loss)(params, tokens, targets)

    def _loss_and_grads(self, params, tokens, targets):
        """The loss of a global batch and its gradients, both summed over all ranks."""
        if not self._heap_sums():
            return jax.value_and_grad(self.loss)(params, tokens, targets)
        return self._on_each_rank(jax.value_and_grad(self._own_loss))(
            params, tokens, targets
        )

    def _own_loss(self, params, tokens, targets):
        """A rank's share of the loss: ranks hold equally many tokens."""
        return self.loss(params, tokens, targets) / self.mesh.size

    def _on_each_rank(self, function):
        """`function` on the shards of a batch, its results summed by one call.

        Left to itself JAX makes a sum for each parameter, and XLA one of its
        collectives out of it, which cannot be where ranks share a GPU.
        """

        def local(params, tokens, targets):
            # Typed as different on each rank: nothing inside is summed over ranks.
            params = jax.tree.map(
                lambda p: jax.lax.pcast(p, AXES, to="varying"), params
            )
            return jax_ulysses.psum(
                function(params, tokens, targets), AXES, via=self.config.reductions
            )

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), _TOKENS, _TOKENS),
            out_specs=PartitionSpec(),
        )

    def _step(self, state, tokens, targets):
        loss, grads = self._loss_and_grads(state["params"], tokens, targets)
        updates, opt_state = self._optimizer.update(
            grads, state["opt_state"], state["params"]
        )
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return {"params": params, "opt_state": opt_state}, metrics

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The traced step, which another thread may compile."""
        with jax.set_mesh(self.mesh):
            shape = self.config.batch, self.config.seq_len
            where = NamedSharding(self.mesh, _TOKENS)
            batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
            step = jax.jit(self._step, donate_argnums=0)
            return step.lower(self.abstract_state(), batch, batch)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step."""
        return self.lowered.compile()

    def step_memory(self) -> dict[str, int]:
        """Bytes that XLA plans for a step on one device, without the heap."""
        plan = self.compiled.memory_analysis()
        assert plan is not None  # CPUs and GPUs have one.
        sizes = plan.argument_size_in_bytes, plan.temp_size_in_bytes
        return dict(zip(("arguments", "temporaries"), sizes))

    def _train_batch(self, step: int):
        return data.train_batch(
            self.corpus,
            seed=self.config.seed,
            step=step,
            batch=self.config.batch,
            seq_len=self.config.seq_len,
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
        with jax.set_mesh(self.mesh):
            for step in range(first_step, self.config.steps):
                start = time.perf_counter()
                batch = self.put_batch(*self._train_batch(step))
                state, metrics = self.compiled(state, *batch)
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
            loss = jax.jit(self._whole_loss)
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
