"""What it takes to run gorila-stream for real: image, compose file, Kubernetes manifests, dashboards and alert rules. No part of the product imports this."""
