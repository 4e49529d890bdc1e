CLAIMS = "pipeline/studies/paper/claims.yaml"
