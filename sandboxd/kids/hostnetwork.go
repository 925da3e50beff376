package kids

import (
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// Approval is a person's signed word that one kid may live on the machine's network. The zero value is nobody's.
type Approval struct {
	wire.Approval
	Note string // the signed order as it came
}

// approve asks for the word of a person, where the kid needs one. Root's own is none.
func (r *Request) approve() (err error) {
	if r.Plan.Network != session.NetworkHost {
		return nil
	}
	if r.Approve != nil {
		r.approved, err = r.Approve()
	}
	if err == nil && (r.approved.By == "" || r.approved.Order == "" || r.approved.Key == "") {
		err = refuse(Invalid, reason.OrderUnsigned, "a kid on the machine's network takes the signed approval of a person: `tagout approve` makes one")
	}
	return err
}

// view is what stands in the session document and what people see; nil: nobody approved anything.
func (a Approval) view() *wire.Approval {
	if a.By == "" {
		return nil
	}
	return &a.Approval
}

// into says in the record of the spawn who approved.
func (a Approval) into(fields map[string]string) {
	if a.By != "" {
		fields["network"], fields["approved_by"], fields["approval"] = session.NetworkHost, a.By, a.Order
		fields["approval_key"], fields["approval_note"] = a.Key, a.Note
	}
}
