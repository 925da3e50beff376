package wire

import "time"

// LeaseRequest renews the lease on which all kids live, or says why it must not be renewed.
type LeaseRequest struct {
	Unwell []string `json:"unwell,omitempty"` // what is not as it should be, one line each; empty: renew
}

// LeaseReply says how long the kids' lease still runs.
type LeaseReply struct {
	Left time.Duration `json:"left_ns"` // 0: it has run out
}
