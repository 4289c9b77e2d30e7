"""A manifest for Kubernetes that starts a job: a JobSet with one launcher in each pod."""

from __future__ import annotations

import yaml

from meshpar.launch.options import Options

__all__ = ["jobset_manifest"]


def jobset_manifest(options: Options, interpreter: str = "python") -> str:
    """The manifest to give to `kubectl apply -f`; the cluster needs the JobSet controller.

    Args:
      options: of the job. `--master` counts for its port only: the first pod is the master.
      interpreter: the Python of the image.

    Raises:
      ValueError: no `--image`, or a name that Kubernetes does not take.
    """
    name = options.job_id.lower().replace("_", "-")
    if options.image is None:
        raise ValueError("--print k8s: --image names the container image that has the script")
    if not name.replace("-", "").isalnum() or not name[0].isalpha() or len(name) > 40:
        raise ValueError(
            f"--print k8s: --job_id {options.job_id}: a name of letters, digits and '-', at most "
            "40, that begins with a letter"
        )
    high = options.nnodes[1]
    command = [interpreter, "-m", "meshpar.launch"]
    if high > 1:
        port = "6170" if options.master is None else options.master.rpartition(":")[2]
        # A pod of a JobSet is <set>-<job>-<number of the job>-<number of the pod>.<set>.
        command += ["--master", f"{name}-nodes-0-0.{name}:{port}"]
        command += ["--rank", "$(JOB_COMPLETION_INDEX)"]
    # Kubernetes fills in $(NAME), but for $$(NAME).
    words = options.argv(without=("master", "rank", "host"))
    command += [word.replace("$(", "$$(") for word in words]
    container: dict[str, object] = {"name": "ranks", "image": options.image, "command": command}
    if options.resource:
        limits = dict(pair.rsplit("=", 1) for pair in options.resource)
        container["resources"] = {"limits": limits}
    pod = {"restartPolicy": "Never", "containers": [container]}
    job = {
        "completionMode": "Indexed",
        "completions": high,
        "parallelism": high,
        "backoffLimit": 0,  # restarts are the launcher's
        "template": {"spec": pod},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False)
