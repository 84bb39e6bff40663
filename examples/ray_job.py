# moe-cluster: 2 nodes, 16 ranks: dp_shard=16 ep=8
# moe-cluster: 4 nodes, 32 ranks: dp_shard=32 ep=8
# log          /shared/runs/moe-cluster/log.jsonl
# status       convoy status /shared/runs/moe-cluster
# checkpoints  /shared/runs/moe-cluster/checkpoints
# metrics      http://NODE-OF-RANK-0:9400/metrics
"""moe-cluster on Ray: run this where the cluster of RAY_ADDRESS is reached, or with ray job submit."""

import sys

from cluster.launch.ray import fit

JOB = r"""
{
 "launch": {
  "nodes": "2:4",
  "ranks_per_node": 8,
  "gpus_per_node": 8,
  "cpus_per_rank": 8,
  "walltime_minutes": 240.0,
  "queue": "batch",
  "workdir": "/shared",
  "python": "python3",
  "environment": {
   "NCCL_DEBUG": "WARN"
  },
  "kubernetes": {
   "namespace": "training",
   "volume_claim": "shared-runs",
   "topology_label": "topology.example/rack"
  }
 },
 "name": "moe-cluster",
 "version": "0.1.0",
 "program": [
  "-m",
  "convoy",
  "pretrain"
 ],
 "config": "/shared/examples/cluster.toml",
 "overrides": [
  "--set",
  "train.time_limit_seconds=14400.0"
 ],
 "run_dir": "/shared/runs/moe-cluster",
 "checkpoints": "/shared/runs/moe-cluster/checkpoints",
 "metrics_port": 9400
}
"""
SPEC = r"""
{
 "name": "moe-cluster",
 "run_dir": "runs/moe-cluster",
 "model": {"d_model": 192, "num_heads": 6, "num_kv_heads": 2, "head_dim": null, "qk_norm": "head", "attention_bias": "none", "kv_lora_rank": 0, "q_lora_rank": 0, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "rope_theta": 10000.0, "rope_interleaved": false, "yarn": null, "multipliers": null, "norm_eps": 1e-06, "vocab_size": 4096, "num_layers": 4, "d_ff": 512, "first_k_dense": 1, "num_mtp_layers": 0, "norm_after": false, "tie_embeddings": false, "max_seq_len": 0},
 "moe": {"num_experts": 32, "top_k": 2, "score_func": "softmax", "router_bias": false, "softmax_after_topk": false, "norm_topk_prob": true, "route_scale": 1.0, "input_jitter": 0.0, "routing": "top_k", "n_groups": 1, "topk_groups": 1, "topk_per_group": 2, "capacity": {"policy": "dropless", "max_tokens_per_rank": 0}, "balancing": "standard", "expert_bias": false, "bias_update_rate": 0.001, "aux_loss_coeff": 0.01, "aux_loss_scope": "micro_batch", "seq_aux_loss_coeff": 0.0, "z_loss_coeff": 0.0, "d_ff": 256, "activation": "swiglu", "activation_limit": 0.0, "ffn_bias": false, "num_shared_experts": 0, "shared_expert_gate": false, "weights_on_input": false, "backend": "auto", "recompute_experts": false, "dispatcher": "all_to_all", "dispatch_dtype": "compute", "overlap_chunks": 1, "copies": 0},
 "mtp": {"loss_weight": 0.3, "stages": []},
 "parallel": {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "ep": 8, "tp_across_nodes": false, "max_nodes_per_token": 0, "gradient_compression": "none", "pipeline": {"schedule": "1f1b", "stages_per_rank": 1}, "memory": {"zero_stage": 3, "offload_optimizer": false, "offload_activations": false, "recompute": "none", "recompute_layer_freq": 1}},
 "plan": {"cluster": null},
 "data": {"source": "stdlib", "path": "runs/corpora/stdlib-4096", "sources": {}, "stages": [], "validation": {}, "seq_len": 256, "cache_dir": "", "cache_gib": 256.0, "shard_tokens": 67108864, "tokenizer": null, "end_token": "<|endoftext|>", "document_mask": false, "packing": "concat", "mask_boundary_labels": false, "text_field": "text", "chat": null, "deduplicate": false, "filter": {"min_characters": 0}},
 "batch": {"global_batch_size": 256, "micro_batch_size": 4, "batch_size_rampup": null, "stages": []},
 "train": {"steps": 240, "seed": 0, "compile": false, "exact": false, "log_interval_steps": 10, "timeout_seconds": 300.0, "time_limit_seconds": 14400.0, "parts": []},
 "precision": {"compute": "float32", "loss_scale": 65536, "experts": "compute", "dense": "compute"},
 "init": {"checkpoint": null, "state": "weights", "rename": {}, "strict": true},
 "optimizer": {"kind": "adamw", "lr": 0.006, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1, "clip_norm": 1.0},
 "tune": null,
 "schedule": {"kind": "cosine", "warmup_steps": 24, "decay_steps": 0, "min_lr_ratio": 0.1},
 "eval": {"interval_steps": 80, "sequences": 128, "final_sequences": 4096},
 "checkpoint": {"path": null, "interval_steps": 80, "interval_minutes": null, "compression": "none", "reshard_on_load": true, "retention": {"keep": 2, "keep_every": 0, "keep_best": 0, "grace_seconds": 0.0}, "tiers": {"memory": false, "memory_path": "/dev/shm", "replicate_to_peer": false, "local_path": null, "shared_interval": 1}},
 "elastic": {"enabled": true, "recovery": "restart"},
 "launch": {"nodes": "2:4", "ranks_per_node": 8, "gpus_per_node": 8, "cpus_per_rank": 8, "walltime_minutes": 240.0, "queue": "batch", "image": null, "workdir": "/shared", "python": "python3", "environment": {"NCCL_DEBUG": "WARN"}, "setup": [], "burn_in": null, "rendezvous": {}, "max_restarts": 100, "options": [], "kubernetes": {"kind": "TrainJob", "namespace": "training", "volume_claim": "shared-runs", "secret": null, "topology_label": "topology.example/rack"}},
 "stragglers": {"rebalance": false, "min_slowdown": 0.1, "patience_steps": 50, "replace": false},
 "health": {"go_back_checkpoints": 1, "skip_steps": 100, "lr_factor": 0.5, "window_steps": 128, "not_finite": {"actions": ["stop"]}, "loss_spike": {"actions": ["skip", "skip", "skip", "go_back", "go_back+lower_lr", "stop"], "threshold": 6.0}, "grad_norm_spike": {"actions": ["skip", "skip", "skip", "go_back", "go_back+lower_lr", "stop"], "threshold": 10.0}, "slow_divergence": {"actions": ["report"]}, "router_collapse": {"actions": ["report"], "patience_steps": 100, "min_entropy_ratio": 0.5}},
 "inject": [],
 "verify": {"parameters_interval_steps": "save", "gradients_interval_steps": 0, "on_mismatch": "stop"},
 "detection": {"stuck_seconds": 30.0, "end_stuck_run": false},
 "metrics": {"port": 9400, "host": "127.0.0.1", "all_ranks": false, "targets_dir": null, "dollars_per_rank_hour": null},
 "tracking": {"to": [], "project": "convoy"},
 "sample": {"prompt": "def main(", "tokens": 80}
}
"""

if __name__ == "__main__":
    sys.exit(fit(JOB, SPEC))
