export {plot, axisX, axisY, dot, gridY, line, lineY, rectY, ruleX, ruleY, text} from "@observablehq/plot";
