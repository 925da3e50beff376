package auditexport

import (
	"strconv"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/auditview"
)

// ocsfVersion is the version of the Open Cybersecurity Schema Framework (https://schema.ocsf.io) that events follow.
const ocsfVersion = "1.8.0"

// object is an OCSF object or event.
type object = map[string]any

// Classes.
const (
	classFile    = 1001
	classProcess = 1007
	classLogin   = 3002
	classNetwork = 4001
	classHTTP    = 4002
	classDNS     = 4003
	classAPI     = 6003
)

// activity is what OCSF calls what happened: the class, and the activity's number in it.
type activity struct{ class, id int }

const otherActivity = 99

// activities are the events that have a class of their own. All others are API Activity: something was asked of Tagout,
// or done by it.
var activities = map[string]activity{
	audit.EventExecStarted: {classProcess, 1}, audit.EventExecEnded: {classProcess, 2}, audit.EventExecSeen: {classProcess, 1}, audit.EventProcessStarted: {classProcess, 1},
	audit.EventKidOOM: {classProcess, 2}, audit.EventKidKilled: {classProcess, 2},

	audit.EventFileCreated: {classFile, 1}, audit.EventFileRead: {classFile, 2}, audit.EventFilesListed: {classFile, 8}, audit.EventFileWritten: {classFile, 3}, audit.EventFileChanged: {classFile, 3},
	audit.EventFileDeleted: {classFile, 4}, audit.EventFileRenamed: {classFile, 5}, audit.EventWriteSeen: {classFile, 3},

	audit.EventConnectDenied: {classNetwork, 5}, audit.EventConnOpened: {classNetwork, 1}, audit.EventConnClosed: {classNetwork, 2}, audit.EventConnProgress: {classNetwork, 6},
	audit.EventRequest: {classHTTP, otherActivity}, audit.EventLookup: {classDNS, 1},

	audit.EventTokenMinted: {classLogin, 3}, audit.EventTokenUsed: {classLogin, 4}, audit.EventTokenRefused: {classLogin, 4}, audit.EventTokenRevoked: {classLogin, 2}, audit.EventTokenExpired: {classLogin, 2},
}

// httpActivities are the numbers that HTTP Activity gives methods.
var httpActivities = map[string]int{"CONNECT": 1, "DELETE": 2, "GET": 3, "HEAD": 4, "OPTIONS": 5, "POST": 6, "PUT": 7, "TRACE": 8, "PATCH": 9}

// apiVerbs are the numbers that API Activity gives what an event's name ends in.
var apiVerbs = map[string]int{
	"spawned": 1, "placed": 1, "added": 1, "kept": 1, "loaded": 1, "approved": 1, "allowed": 1, "read": 2, "listed": 2, "seen": 2,
	"changed": 3, "paused": 3, "resumed": 3, "received": 3, "completed": 3, "progress": 3, "unlocked": 3, "sealed": 3, "renewed": 3, "attached": 3,
	"destroyed": 4, "removed": 4, "ended": 4, "released": 4, "expired": 4, "deleted": 4,
}

// Event returns the record as an OCSF event. version is Tagout's.
func Event(l *auditview.Line, version string) map[string]any {
	r := &l.Record
	a := activityOf(r)
	e := object{
		"class_uid": a.class, "category_uid": a.class / 1000, "activity_id": a.id, "type_uid": a.class*100 + a.id,
		"severity_id": ocsfSeverity(r), "time": r.Time.UnixMilli(), "message": message(l),
		"metadata": object{
			"version": ocsfVersion, "product": object{"name": "Tagout", "vendor_name": "Tagout", "version": version},
			"uid": orUnknown(r.ID), "event_code": r.Event, "log_name": orUnknown(r.Daemon), "original_time": strconv.FormatInt(r.Time.UnixNano(), 10),
		},
		"unmapped": unmapped(l),
	}
	if a.id == otherActivity {
		e["activity_name"] = r.Event
	}
	switch r.Outcome {
	case audit.OutcomeOK, audit.OutcomeAllow:
		e["status_id"], e["status"] = 1, "Success"
	case audit.OutcomeDeny, audit.OutcomeFail:
		e["status_id"], e["status"] = 2, "Failure"
	}
	if r.Reason != 0 {
		e["status_code"], e["status_detail"] = r.Reason.String(), r.Reason.Info().Text
	}
	classes[a.class](l, e)
	return e
}

func activityOf(r *audit.Record) activity {
	a, ok := activities[r.Event]
	switch {
	case ok && a.class == classHTTP:
		if id := httpActivities[strings.ToUpper(r.Fields["method"])]; id != 0 {
			a.id = id
		}
	case ok && a.class == classNetwork && a.id == 1 && r.Outcome == audit.OutcomeDeny:
		a.id = 5
	case ok && a.class == classNetwork && a.id == 1 && r.Outcome == audit.OutcomeFail:
		a.id = 4
	case !ok:
		_, verb, _ := strings.Cut(r.Event, ".")
		a = activity{classAPI, otherActivity}
		if id := apiVerbs[verb]; id != 0 {
			a.id = id
		}
	}
	return a
}

func ocsfSeverity(r *audit.Record) int {
	switch {
	case auditview.Topic(r.Event) == auditview.Stop && r.Event != audit.EventProofPassed:
		return 4
	case r.Outcome == audit.OutcomeDeny:
		return 3
	case r.Outcome == audit.OutcomeFail, r.Event == audit.EventGap:
		return 3
	}
	return 1
}

func message(l *auditview.Line) string {
	return strings.TrimSpace(auditview.OneLine(l.Event+" "+l.Outcome) + " " + auditview.What(l))
}

// unmapped is what of the record has no attribute in OCSF, or would have to be searched for in several.
func unmapped(l *auditview.Line) object {
	r := &l.Record
	u := object{"instance": r.Instance, "boot_id": r.BootID, "boot_ns": int64(r.Boot), "event": r.Event}
	for k, v := range map[string]string{"kid": r.Kid, "session": r.Session, "card": r.Card, "actor": r.Actor, "outcome": r.Outcome, "detail": r.Detail} {
		if v != "" {
			u[k] = v
		}
	}
	if r.Count > 0 {
		u["count"] = r.Count
	}
	if len(r.Fields) > 0 {
		u["fields"] = r.Fields
	}
	for k, v := range l.Extra() {
		u[k] = v
	}
	return u
}

// classes fill in what each class has beyond the others.
var classes = map[int]func(*auditview.Line, object){
	classProcess: func(l *auditview.Line, e object) {
		e["actor"], e["device"], e["process"] = actor(l), device(l), process(l)
		if code, err := strconv.Atoi(l.Fields["code"]); err == nil {
			e["exit_code"] = code
		}
	},
	classFile: func(l *auditview.Line, e object) {
		e["actor"], e["device"], e["file"] = actor(l), device(l), file(l.Fields["path"], l.Fields["kind"])
		if from := l.Fields["from"]; from != "" && l.Event == audit.EventFileRenamed {
			e["file"], e["file_result"] = file(from, l.Fields["kind"]), e["file"]
		}
	},
	classNetwork: network,
	classDNS: func(l *auditview.Line, e object) {
		network(l, e)
		if l.Dst != nil && l.Dst.Name != "" {
			q := object{"hostname": l.Dst.Name}
			if t := l.Fields["type"]; t != "" {
				q["type"] = t
			}
			e["query"] = q
		}
	},
	classHTTP: func(l *auditview.Line, e object) {
		network(l, e)
		request := object{}
		if m := l.Fields["method"]; m != "" {
			request["http_method"] = m
		}
		if p := l.Fields["path"]; p != "" {
			request["url"] = object{"path": p}
		}
		e["http_request"] = request
	},
	classLogin: func(l *auditview.Line, e object) {
		service := l.Fields["secret"]
		if service == "" {
			service = l.Daemon
		}
		e["user"], e["service"] = object{"name": orUnknown(l.Kid), "type_id": 99, "type": "Kid"}, object{"name": orUnknown(service)}
		if l.Session != "" {
			e["session"] = object{"uid": l.Session}
		}
		if to := destination(l); to != nil {
			e["dst_endpoint"] = to
		}
	},
	classAPI: func(l *auditview.Line, e object) {
		e["actor"], e["src_endpoint"] = actor(l), source(l)
		operation := l.Event
		if tool := l.Fields["tool"]; tool != "" {
			operation = tool
		}
		e["api"] = object{"operation": operation, "service": object{"name": orUnknown(l.Daemon)}}
	},
}

func network(l *auditview.Line, e object) {
	e["src_endpoint"] = source(l)
	if to := destination(l); to != nil {
		e["dst_endpoint"] = to
	}
	info := object{"direction_id": 2, "direction": "Outbound"}
	if l.Conn != "" {
		info["uid"] = l.Conn
	}
	if l.Dst != nil && l.Dst.Proto != "" {
		info["protocol_name"] = l.Dst.Proto
	}
	e["connection_info"] = info
	if b := l.Bytes; b != nil {
		e["traffic"] = object{"bytes_out": b.Up, "bytes_in": b.Down, "bytes": b.Up + b.Down}
	}
}

func source(l *auditview.Line) object {
	s := object{"name": orUnknown(l.Kid)}
	if l.Kid == "" {
		s["name"] = orUnknown(l.Instance)
	}
	if l.Session != "" {
		s["uid"] = l.Session
	}
	return s
}

func destination(l *auditview.Line) object {
	to := object{}
	if d := l.Dst; d != nil {
		if d.Name != "" {
			to["hostname"] = d.Name
		}
		if a := address(l); a != "" {
			to["ip"] = a
		}
		if len(to) > 0 && d.Port != 0 {
			to["port"] = int(d.Port)
		}
	}
	if len(to) == 0 {
		return nil
	}
	return to
}

func actor(l *auditview.Line) object {
	a := object{"app_name": orUnknown(l.Daemon)}
	if l.Actor != "" {
		a["user"] = object{"name": l.Actor}
	}
	if l.Process != nil && l.Process.PID > 0 {
		a["process"] = process(l)
	}
	if l.Session != "" {
		a["session"] = object{"uid": l.Session}
	}
	return a
}

// process is who did it or what was started, as far as the record tells: by its pid, or else by the session in which it ran.
func process(l *auditview.Line) object {
	p := object{}
	if l.Process != nil {
		if l.Process.PID > 0 {
			p["pid"] = l.Process.PID
		}
		if l.Process.Comm != "" {
			p["name"] = l.Process.Comm
		}
		if l.Process.Exe != "" {
			p["file"] = file(l.Process.Exe, "")
		}
		if l.Process.Parent > 0 {
			p["parent_process"] = object{"pid": l.Process.Parent}
		}
	}
	for _, field := range []string{"argv", "arguments", "command"} {
		if v := l.Fields[field]; v != "" {
			p["cmd_line"] = v
			break
		}
	}
	if _, ok := p["pid"]; !ok {
		p["uid"] = orUnknown(l.Fields["exec"] + l.Session)
	}
	return p
}

func file(path, kind string) object {
	name := path[strings.LastIndexByte(path, '/')+1:]
	f := object{"name": orUnknown(name), "type_id": 1}
	if kind == "directory" {
		f["type_id"] = 2
	}
	if path != "" {
		f["path"] = path
	}
	return f
}

// device is where it happened: the kid, or the box.
func device(l *auditview.Line) object {
	if l.Kid == "" {
		return object{"type_id": 1, "name": orUnknown(l.Instance)}
	}
	d := object{"type_id": 6, "name": l.Kid}
	if l.Session != "" {
		d["uid"] = l.Session
	}
	return d
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
