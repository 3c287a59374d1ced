"""`gorila doctor`: evidence gathered once (examine.py), judged by pure checks (topic_checks, flow_checks, reference_checks), each finding with what to do."""

from gorila.doctor.evidence import Evidence
from gorila.doctor.examine import examine
from gorila.doctor.finding import Finding, worst_first
from gorila.doctor.flow_checks import flow_findings
from gorila.doctor.reference_checks import reference_findings
from gorila.doctor.topic_checks import topic_findings

__all__ = ["Evidence", "Finding", "examine", "findings_of", "worst_first"]


def findings_of(evidence: Evidence) -> list[Finding]:
    """Every check, in the order a person would make them."""
    return [*topic_findings(evidence), *flow_findings(evidence), *reference_findings(evidence)]
