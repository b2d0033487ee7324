# Environment variables of NCCL, gloo and torch for jobs on a cluster; set here and nowhere else.
# train.sbatch sources this on the first node; srun passes it on to the others. Values from outside take precedence:
#   NCCL_DEBUG=INFO harness train launch=slurm ...

# Network interface for nodes with several; by default NCCL and gloo choose, and may choose differently.
# Example for InfiniBand: NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
[[ -z ${NCCL_SOCKET_IFNAME:-} ]] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${NCCL_SOCKET_IFNAME#[=^]}}

# NCCL logs warnings only.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Time NCCL waits for a link that flaps: 4.096 us * 2^22 = 17 s a try, 7 tries.
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}

# A collective that failed or timed out ends its process, so that the agent detects it, instead of hanging.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# Flight recorder: the last collectives of every rank are written on a timeout and show which rank was missing.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# The sentinel handles NaN on the device; NCCL's own check would end the process at the first NaN.
export TORCH_NCCL_NAN_CHECK=${TORCH_NCCL_NAN_CHECK:-0}
# A TCPStore shared by agents and ranks would keep keys of an earlier start.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

# Expandable segments avoid fragmentation of device memory in long runs.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# Unbuffered output, so that the job log can be followed.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
