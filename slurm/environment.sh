# What NCCL, the fabric and torch are told on a cluster: all of it here, and nowhere else.
# Sourced by train.sbatch on the first node; srun hands it on to the others. A value from outside wins:
#   NCCL_DEBUG=INFO harness train launch=slurm ...

# Which network the ranks talk on, where a node has several; without it NCCL and gloo choose, and may choose differently.
# Example of a fabric with InfiniBand: NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
[[ -z ${NCCL_SOCKET_IFNAME:-} ]] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${NCCL_SOCKET_IFNAME#[=^]}}

# NCCL says what it complains about, and nothing else.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# A link that flaps is waited for (4.096 us * 2^22 = 17 s a try, 7 tries) before the job is given up.
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}

# A collective that failed or timed out ends its process, so that the agent sees it, instead of hanging.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# The last collectives of every rank are kept and written out on a timeout: they tell which rank did not come.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# The sentinel judges numbers on the device; NCCL's own check would end the process at the first NaN.
export TORCH_NCCL_NAN_CHECK=${TORCH_NCCL_NAN_CHECK:-0}
# A store that the agents and the ranks share keeps keys of an earlier start.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

# Long runs fragment device memory; segments that grow do not.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# The log of the job is to be read while it runs.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
