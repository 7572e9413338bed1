"""Names of the constructor arguments of SageMaker's SDK 2.257.7, which tests/launch/third_party/test_sdk.py compares.

Those of ModelTrainer and its configurations are of the packages sagemaker-train 1.27.0 and sagemaker-core 2.27.0.
"""

_ALL = """
base_job_name checkpoint_local_path checkpoint_s3_uri code_location container_arguments container_entry_point
container_log_level debugger_hook_config dependencies disable_output_compression disable_profiler enable_infra_check
enable_network_isolation enable_remote_debug enable_sagemaker_metrics enable_session_tag_chaining
encrypt_inter_container_traffic entry_point environment git_config hyperparameters image_uri input_mode instance_count
instance_groups instance_placement_config instance_type keep_alive_period_in_seconds max_retry_attempts max_run
max_wait metric_definitions model_channel_name model_uri output_kms_key output_path profiler_config role rules
sagemaker_session security_group_ids source_dir subnets tags tensorboard_output_config training_plan
training_repository_access_mode training_repository_credentials_provider_arn use_spot_instances volume_kms_key
volume_size
""".split()
_OWN = {
    "PyTorch": "compiler_config distribution framework_version py_version recipe_overrides training_recipe",
    "TensorFlow": "compiler_config distribution framework_version model_dir py_version",
    "HuggingFace": "compiler_config distribution py_version pytorch_version tensorflow_version transformers_version",
}
SDK_ARGUMENTS = {kind: sorted([*_ALL, *names.split()]) for kind, names in _OWN.items()}
TRAINER_ARGUMENTS = """
algorithm_name base_job_name checkpoint_config compute distributed environment hyperparameters input_data_config
input_s3_key_prefix local_container_root model_package_config networking output_data_config role sagemaker_session
source_code stopping_condition tags training_image training_image_config training_input_mode training_mode
""".split()
#: Without fields that the service sets itself.
TRAINER_CONFIGS = {
    kind: names.split()
    for kind, names in {
        "SourceCode": "source_dir requirements entry_script command args ignore_patterns",
        "Compute": "instance_type instance_count volume_size_in_gb volume_kms_key_id keep_alive_period_in_seconds "
        "instance_groups training_plan_arn instance_placement_config instance_preferences enable_managed_spot_training",
        "Networking": "security_group_ids subnets enable_network_isolation enable_inter_container_traffic_encryption",
        "StoppingCondition": "max_runtime_in_seconds max_wait_time_in_seconds max_pending_time_in_seconds",
        "InputData": "channel_name data_source content_type",
        "OutputDataConfig": "s3_output_path kms_key_id compression_type",
        "CheckpointConfig": "s3_uri local_path",
        "SMP": "hybrid_shard_degree sm_activation_offloading activation_loading_horizon fsdp_cache_flush_warnings "
        "allow_empty_shards tensor_parallel_degree context_parallel_degree expert_parallel_degree random_seed",
        "Torchrun": "process_count_per_node smp",
        "MPI": "process_count_per_node mpi_additional_options",
    }.items()
}
